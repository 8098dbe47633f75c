"""The launches of a GEMM: by descriptors where the chip can fetch its operands so, else by pointers; tiles, strides."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from octavo_jax.plugin_api import dtype_name
from octavo_jax_triton.gemm.hopper import columns_on_hopper
from octavo_jax_triton.gemm.operands import Planes
from octavo_jax_triton.launch.arguments import Output, Target, block_descriptor, divisible_by_16
from octavo_jax_triton.launch.launch_kernel import launch_kernel
from octavo_triton.kernels.described_columns import described_columns
from octavo_triton.kernels.described_rows import described_rows
from octavo_triton.kernels.gemm_columns import columns_times_columns
from octavo_triton.kernels.gemm_rows import rows_times_matrices
from octavo_triton.layouts import TILE, panels_of, tiles
from octavo_triton.products.shapes import Shape
from octavo_triton.products.spec import GemmSpec
from octavo_triton.products.tiles import BESIDE, described_tile, launch_constants, tile_of


class Bias(NamedTuple):
    """The bias of each group and column, and what scales it per row; None: there is none."""

    data: Array | None
    scales: Array | None

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of groups, columns and scales."""
        return (0, 0, 0) if self.data is None else (self.data.shape[1], 1, 0 if self.scales is None else 1)


def _by_pointers(spec: GemmSpec) -> dict[str, Any]:
    dtype = None if spec.scaling != "none" else spec.dtype
    return {"A_DTYPE": dtype, "B_DTYPE": dtype, "SCALES": spec.scales, "BLOCK": spec.block}


def rows_by_matrices(
    spec: GemmSpec, left: Planes, right: Planes, table: Array, bias: Bias, out: Output, target: Target
) -> Array:
    """fprop and dgrad."""
    (a, a_scale, _), (b, b_scale, _) = left, right
    (rows, depth), columns, dgrad = a.shape, out.shape[1], spec.gemm == "dgrad"
    groups = b.shape[0] // tiles(depth) if spec.turned else b.shape[0]
    panels, strides = panels_of(rows, groups), (columns, 1, *bias.strides)
    of_bias = None if bias.data is None else dtype_name(bias.data.dtype, "bias")
    shared: dict[str, Any] = {
        "OUT_DTYPE": spec.out_dtype, "BIAS_DTYPE": of_bias, "SQUARE": spec.square, "COLUMNWISE": dgrad,
        "EVEN": divisible_by_16(depth, columns),
    }  # fmt: skip
    tile = described_tile(spec)
    if tile is not None:
        block = (1, tile.depth, tile.columns) if dgrad and not spec.turned else (1, tile.columns, tile.depth)
        of_a, of_b = block_descriptor(a, (TILE, tile.depth)), block_descriptor(b, block)
        if of_a is not None and of_b is not None:
            across = tiles(columns, tile.columns)
            arguments: tuple[Any, ...] = (
                of_a, a_scale, of_b, b_scale, bias.data, bias.scales, table, out,
                rows, depth, columns, groups, panels, across, *strides,
            )  # fmt: skip
            if not target.has_copy_engine:
                arguments = (a, a_scale, b, *arguments[3:])
            how = {**shared, **launch_constants(spec, tile), "BESIDE": BESIDE, "POINTERS": not target.has_copy_engine}
            return launch_kernel(described_rows, (panels * across,), arguments, target, **how)[out.name]
    tile = tile_of(spec)
    # of b [G, J, I], or [G, I, J] in dgrad; or of turned panels [G ceil(I / 128), J, 128]
    b_group, b_depth, b_column = b.shape[1] * b.shape[2], 1, b.shape[2]
    if spec.turned:
        b_group *= tiles(depth)
    elif dgrad:
        b_depth, b_column = b_column, b_depth
    arguments = (
        *left, *right, bias.data, bias.scales, table, out,
        rows, depth, columns, groups, panels, depth, 1, b_group, b_depth, b_column, *strides,
    )  # fmt: skip
    how = {**_by_pointers(spec), **shared, **launch_constants(spec, tile), "IN_PANELS": spec.turned}
    return launch_kernel(rows_times_matrices, (panels, tiles(columns, tile.columns)), arguments, target, **how)[
        out.name
    ]


def columns_by_columns(spec: GemmSpec, left: Planes, right: Planes, table: Array, out: Output, target: Target) -> Array:
    """wgrad."""
    made = columns_on_hopper(spec, left, right, table, out, target)
    if made is not None:
        return made
    (a, a_scale, _), (b, b_scale, _) = left, right
    groups, height, width = out.shape
    shared: dict[str, Any] = {
        "OUT_DTYPE": spec.out_dtype,
        "ACCUMULATE": False,
        "ROWS": TILE,
        "EVEN": divisible_by_16(height, width),
    }
    strides = (height * width, width, 1)
    tile = described_tile(spec)
    if tile is not None:
        blocks: tuple[Shape, Shape] = ((tile.depth, TILE), (tile.depth, tile.columns))
        if spec.turned:
            blocks = ((1, TILE, tile.depth), (1, tile.columns, tile.depth))
        of_a, of_b = block_descriptor(a, blocks[0]), block_descriptor(b, blocks[1])
        if of_a is not None and of_b is not None:
            arguments: tuple[Any, ...] = (of_a, a_scale, of_b, b_scale, table, out, height, width, groups, *strides)
            grid: Shape = (tiles(height) * tiles(width, tile.columns), groups)
            if not target.has_copy_engine:
                arguments = (a, a_scale, b, *arguments[3:])
            how = {**shared, **launch_constants(spec, tile), "BESIDE": BESIDE, "POINTERS": not target.has_copy_engine}
            return launch_kernel(described_columns, grid, arguments, target, **how)[out.name]
    tile = tile_of(spec)
    arguments = (*left, *right, table, out, height, width, groups, a.shape[-1], 1, b.shape[-1], 1, *strides)
    how = {**_by_pointers(spec), **shared, **launch_constants(spec, tile), "HADAMARD": spec.hadamard}
    grid = (tiles(height), tiles(width, tile.columns), groups)
    return launch_kernel(columns_times_columns, grid, arguments, target, **how)[out.name]
