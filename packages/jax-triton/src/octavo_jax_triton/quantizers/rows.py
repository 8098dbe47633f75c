"""Rows: the operand of a quantizer as its kernels see it, and the largest magnitudes in it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from octavo_jax.plugin_api import dtype_name
from octavo_jax_triton.arrays.table import groups_of_panels, row_table
from octavo_jax_triton.launch.arguments import Output, Target, divisible_by_16
from octavo_jax_triton.launch.launch_kernel import launch_kernel
from octavo_triton.kernels.quantizers.nvfp4 import hadamard_amax
from octavo_triton.kernels.quantizers.units import unit_amax
from octavo_triton.layouts import TILE, panels_of, tiles
from octavo_triton.quantizer_tiles import HADAMARD_AMAX


class Rows(NamedTuple):
    """Rows [M, K] in groups, or stacked matrices [G, N, K].

    table        of ragged rows; None for matrices of `matrix_rows` rows each
    panels       programs that cover it
    """

    x: Array
    groups: int
    table: Array | None
    panels: int
    matrix_rows: int
    target: Target

    @classmethod
    def of(cls, x: Array, group_sizes: Array | None, target: Target) -> Rows:
        """With the table of `group_sizes`, or of matrices."""
        if group_sizes is None:
            return cls(x, x.shape[0], None, x.shape[0] * tiles(x.shape[1]), x.shape[1], target)
        rows, groups = x.shape[0], group_sizes.shape[0]
        return cls(x, groups, row_table(group_sizes, rows, target), panels_of(rows, groups), 0, target)

    @property
    def columns(self) -> int:
        """K."""
        return self.x.shape[-1]

    @property
    def length(self) -> int:
        """Rows of all matrices."""
        return math.prod(self.x.shape[:-1])

    def grid(self, width: int = TILE) -> tuple[int]:
        """Panels times tiles of `width` columns."""
        return (self.panels * tiles(self.columns, width),)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """The numbers that all kernels over panels take."""
        return self.columns, self.groups, self.panels, self.matrix_rows, self.columns

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that they take."""
        return {
            "DTYPE": dtype_name(self.x.dtype, "x"),
            "STACKED": self.table is None,
            "EVEN": divisible_by_16(self.columns),
        }

    def amaxes(self, *wanted: str) -> dict[str, Array]:
        """int32 patterns of the largest magnitudes of "groups" [G], "rows" [M] and "columns" [G, K].

        Each program stores its own, and XLA finds the largest of them: a kernel that adds to an array of zeros would
        have to take that array over, which jax-triton does by references, and JAX refuses these under remat in a scan.
        """
        across = tiles(self.columns)
        made = {
            "groups": Output("groups", (self.panels, across), jnp.int32),
            "rows": Output("rows", (self.length, across), jnp.int32),
            "columns": Output("columns", (self.panels, self.columns), jnp.int32),
        }
        places = [each if name in wanted else None for name, each in made.items()]
        arguments = (self.x, self.table, *places, *self.sizes)
        parts = launch_kernel(unit_amax, self.grid(), arguments, self.target, **self.constants, APART=True, num_warps=4)
        whole: dict[str, Array] = {}
        for name, part in parts.items():
            if name == "rows":
                whole[name] = jnp.max(part, axis=1, initial=0)
            else:
                whole[name] = self._of_groups(jnp.max(part, axis=1, initial=0) if name == "groups" else part)
        return whole

    def transformed_amaxes(self, *wanted: str) -> dict[str, Array]:
        """The same of "groups" [G], and of what the Hadamard transform makes of "transformed" ones [G]."""
        tile = HADAMARD_AMAX
        names, shape = ("groups", "transformed"), (self.panels, tiles(self.columns, tile.width))
        places = [Output(name, shape, jnp.int32) if name in wanted else None for name in names]
        parts = launch_kernel(
            hadamard_amax, self.grid(tile.width), (self.x, self.table, *places, *self.sizes), self.target,
            **self.constants, APART=True, WIDTH=tile.width, BESIDE=tile.beside, **tile.options,
        )  # fmt: skip
        return {name: self._of_groups(jnp.max(part, axis=1, initial=0)) for name, part in parts.items()}

    def _of_groups(self, of_panels: Array) -> Array:
        """[P, ...] to the largest of each group's panels, [G, ...]; 0 of a group without rows."""
        if self.table is None:
            each = of_panels.reshape(self.groups, tiles(self.matrix_rows), *of_panels.shape[1:])
            return jnp.max(each, axis=1, initial=0)
        largest = jnp.zeros((self.groups, *of_panels.shape[1:]), jnp.int32)
        return largest.at[groups_of_panels(self.table, self.groups, self.panels)].max(of_panels, mode="drop")
