"""Custom calls: functions of traced arrays, to which everything else is a static attribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import octavo_native
from octavo_jax.plugin_api import varying_alike, varying_axes, varying_over
from octavo_jax_native.arrays.planes import result_array
from octavo_jax_native.ffi import targets

Results = Mapping[str, jax.ShapeDtypeStruct]

_WORKSPACE_ALIGNMENT = 256
_LONGEST_WORKSPACE = 1 << 30
_WORKSPACE_COLUMNS = 1 << 20
CPU_THREADS = 1
"""XLA:CPU runs calls side by side on threads of its own."""


def call(
    target: str,
    results: Results,
    operands: Mapping[str, Array],
    attributes: Mapping[str, Any],
    aliases: Mapping[int, int] | None = None,
) -> list[Array]:
    """Run a custom call. `aliases`: from the number of an operand to that of the result that takes over its memory."""
    function = jax.ffi.ffi_call(
        target, list(results.values()), vmap_method="sequential", input_output_aliases=dict(aliases or {})
    )
    alike = varying_alike(list(operands.values()))
    # ffi_call takes its results to be alike on all shards, whatever its operands are.
    arrays: list[Array] = varying_over(list(function(*alike, **attributes)), varying_axes(alike))
    return arrays


def workspace_result(needed: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The workspace as a result, so that XLA owns it: `needed` bytes from an aligned address on, or none.

    Past 1 GiB it has two dimensions, so that none is longer than int32 counts, which is what index types are.
    """
    if not needed:
        return {}
    # XLA aligns buffers to less than the kernels ask of a workspace.
    size = needed + _WORKSPACE_ALIGNMENT
    if size <= _LONGEST_WORKSPACE:
        return {"workspace": result_array((size,), jnp.uint8)}
    return {"workspace": result_array((-(-size // _WORKSPACE_COLUMNS), _WORKSPACE_COLUMNS), jnp.uint8)}


def group_plan(group_sizes: Array, rows: int) -> Array:
    """The plan of ragged rows: int32, two per word, because JAX has no int64 unless it is turned on.

    A call of its own, so that XLA makes one plan for all quantizers and GEMMs of the same sizes and rows.
    """
    if group_sizes.dtype not in (jnp.int32, jnp.int64):
        if group_sizes.dtype in (jnp.uint32, jnp.uint64):
            # Sizes past int32 would turn negative, and those past `rows` are cut there anyway.
            group_sizes = jnp.minimum(group_sizes, rows + 1)
        group_sizes = group_sizes.astype(jnp.int32)
    words = octavo_native.plan_words(rows, group_sizes.shape[0])
    result = {"plan": result_array((2 * words,), jnp.int32)}
    return call(targets.PLAN, result, {"sizes": group_sizes}, {"rows": rows})[0]
