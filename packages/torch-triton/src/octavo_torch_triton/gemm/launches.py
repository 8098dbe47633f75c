"""The launches of a GEMM: by descriptors where the chip can fetch its operands so, else by pointers; tiles, strides."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo_torch.plugin_api import DTYPE_NAMES
from octavo_torch_triton.arrays.launch import described, start, stored
from octavo_torch_triton.gemm.hopper import columns_on_hopper, rows_on_hopper
from octavo_torch_triton.gemm.operands import Bias, Planes
from octavo_triton.kernels.described_columns import described_columns
from octavo_triton.kernels.described_rows import described_rows
from octavo_triton.kernels.device import INTERPRETED
from octavo_triton.kernels.gemm_columns import columns_times_columns
from octavo_triton.kernels.gemm_rows import rows_times_matrices
from octavo_triton.layouts import TILE, panels_of, tiles
from octavo_triton.products.spec import GemmSpec
from octavo_triton.products.tiles import BESIDE, described_tile, launch_constants, tile_of


def _fetched(x: Tensor, block: tuple[int, ...]) -> Any:
    return described(stored(x) if INTERPRETED else x, block)


def rows_by_matrices(spec: GemmSpec, left: Planes, right: Planes, table: Tensor, bias: Bias, out: Tensor) -> None:
    """fprop and dgrad into `out`."""
    if rows_on_hopper(spec, left, right, table, bias, out):
        return
    a, b = left.data, right.data
    dgrad = spec.gemm == "dgrad"
    rows, depth, columns = a.shape[0], a.shape[1], out.shape[1]
    groups = b.shape[0] // tiles(depth) if spec.turned else b.shape[0]
    panels = panels_of(rows, groups)
    shared: dict[str, Any] = {
        "OUT_DTYPE": DTYPE_NAMES[out.dtype], "BIAS_DTYPE": bias.dtype, "SQUARE": spec.square, "COLUMNWISE": dgrad,
    }  # fmt: skip
    tile = described_tile(spec)
    if tile is not None:
        block = (1, tile.depth, tile.columns) if dgrad and not spec.turned else (1, tile.columns, tile.depth)
        of_a, of_b = _fetched(a, (TILE, tile.depth)), _fetched(b, block)
        if of_a is not None and of_b is not None:
            across = tiles(columns, tile.columns)
            arguments = (
                of_a, left.scales, of_b, right.scales, *bias.arguments, table, stored(out),
                rows, depth, columns, groups, panels, across, *out.stride(), *bias.strides,
            )  # fmt: skip
            shared |= launch_constants(spec, tile)
            start(described_rows, (panels * across,), out, arguments, **shared, BESIDE=BESIDE)
            return
    tile = tile_of(spec)
    b_group, b_depth, b_column = (b.stride(0), b.stride(1), b.stride(2))
    if spec.turned:
        b_group, b_depth, b_column = b_group * tiles(depth), 1, b_depth
    elif not dgrad:
        b_depth, b_column = b_column, b_depth
    arguments = (
        *left.arguments, *right.arguments, *bias.arguments, table, stored(out),
        rows, depth, columns, groups, panels, *a.stride(), b_group, b_depth, b_column, *out.stride(), *bias.strides,
    )  # fmt: skip
    start(
        rows_times_matrices, (panels, tiles(columns, tile.columns)), out, arguments,
        A_DTYPE=DTYPE_NAMES.get(a.dtype), B_DTYPE=DTYPE_NAMES.get(b.dtype), SCALES=spec.scales, BLOCK=spec.block,
        IN_PANELS=spec.turned, **shared, **launch_constants(spec, tile),
    )  # fmt: skip


def columns_by_columns(spec: GemmSpec, left: Planes, right: Planes, table: Tensor, out: Tensor) -> None:
    """wgrad into `out`."""
    if columns_on_hopper(spec, left, right, table, out):
        return
    a, b = left.data, right.data
    groups, height, width = out.shape
    shared: dict[str, Any] = {"OUT_DTYPE": DTYPE_NAMES[out.dtype], "ACCUMULATE": spec.accumulate, "ROWS": TILE}
    tile = described_tile(spec)
    if tile is not None:
        if spec.turned:
            of_a, of_b = _fetched(a, (1, TILE, tile.depth)), _fetched(b, (1, tile.columns, tile.depth))
        else:
            of_a, of_b = _fetched(a, (tile.depth, TILE)), _fetched(b, (tile.depth, tile.columns))
        if of_a is not None and of_b is not None:
            arguments = (
                of_a, left.scales, of_b, right.scales, table, stored(out), height, width, groups, *out.stride(),
            )  # fmt: skip
            grid = (tiles(height) * tiles(width, tile.columns), groups)
            shared |= launch_constants(spec, tile)
            start(described_columns, grid, out, arguments, **shared, BESIDE=BESIDE)
            return
    tile = tile_of(spec)
    arguments = (
        *left.arguments, *right.arguments, table, stored(out),
        height, width, groups, *a.stride(), *b.stride(), *out.stride(),
    )  # fmt: skip
    start(
        columns_times_columns, (tiles(height), tiles(width, tile.columns), groups), out, arguments,
        A_DTYPE=DTYPE_NAMES.get(a.dtype), B_DTYPE=DTYPE_NAMES.get(b.dtype), SCALES=spec.scales, BLOCK=spec.block,
        HADAMARD=spec.hadamard, **shared, **launch_constants(spec, tile),
    )  # fmt: skip
