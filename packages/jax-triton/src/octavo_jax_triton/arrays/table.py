"""The table of ragged rows: which rows each group has, found on the device."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from octavo_jax_triton.launch.arguments import Output, Target
from octavo_jax_triton.launch.launch_kernel import launch_kernel
from octavo_triton.kernels.panels import index_rows
from octavo_triton.layouts import index_programs, panels_of, table_words


def row_table(group_sizes: Array, rows: int, target: Target) -> Array:
    """int32, as octavo_triton.kernels.panels has it. A call of its own, so that XLA makes one table for all that read
    the same sizes and rows."""
    groups = group_sizes.shape[0]
    if jnp.issubdtype(group_sizes.dtype, jnp.unsignedinteger):
        # sizes past int32 would turn negative, and those past `rows` are cut there anyway
        group_sizes = jnp.minimum(group_sizes, rows + 1).astype(jnp.int32)
    programs, padded, chunk = index_programs(rows, groups)
    table = Output("table", (table_words(rows, groups),), jnp.int32)
    arguments = (group_sizes, table, None, None, rows, groups, panels_of(rows, groups))
    return launch_kernel(index_rows, (programs,), arguments, target, GROUPS=padded, CHUNK=chunk, FLAG=False)["table"]


def sizes_of(table: Array, groups: int) -> Array:
    """int32 [G]: the rows of each group, cut to bounds."""
    return table[1 : groups + 1] - table[:groups]


def groups_of_panels(table: Array, groups: int, panels: int) -> Array:
    """int32 [P]: the group of each panel; G: none."""
    first = 4 * groups + 1
    return table[first : first + panels]
