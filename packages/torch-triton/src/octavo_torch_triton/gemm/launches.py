"""The launches of a GEMM: its tiles, and the strides of its operands."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from octavo_torch.plugin_api import DTYPE_NAMES
from octavo_torch_triton.arrays.launch import TILE, start, stored, tiles
from octavo_torch_triton.arrays.row_index import panels_of
from octavo_torch_triton.gemm.spec import GemmSpec, Product
from octavo_torch_triton.kernels.gemm_columns import columns_times_columns
from octavo_torch_triton.kernels.gemm_rows import rows_times_matrices


class Tile(NamedTuple):
    """Columns of the result, depth of a step of the sum, warps, stages of the pipeline.

    What stages hold must fit into the shared memory of sm_89 and sm_120, 99 KiB: tests/compiled holds it to that.
    """

    columns: int
    depth: int
    warps: int
    stages: int


TILES: dict[Product, Tile] = {
    "bfloat16": Tile(128, 64, 8, 3),
    "float16": Tile(128, 64, 8, 3),
    "float32": Tile(64, 32, 8, 2),
    "half": Tile(128, 64, 8, 2),
    "fp8": Tile(128, 128, 8, 2),
    "scaled": Tile(128, 128, 8, 2),
}
TILE_OF_COPIES = Tile(128, 32, 8, 2)
"""Of dequantized copies, which are made in registers: a block of MXFP8 deep."""
TILE_OF_INTERPRETER = Tile(128, 128, 4, 1)
"""Each step costs it the same, whatever its size."""


class Planes(NamedTuple):
    """Codes, decode scales and second-level factor of an operand; an unquantized one has the first alone."""

    data: Tensor
    scale: Tensor | None = None
    factor: Tensor | None = None

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        """As kernels take them."""
        scale = None if self.scale is None else stored(self.scale.contiguous())
        return stored(self.data), scale, self.factor


def tile_of(spec: GemmSpec) -> Tile:
    """The tile of a GEMM."""
    if spec.chip == "interpreter":
        return TILE_OF_INTERPRETER
    copies = spec.scaling in ("mxfp8", "nvfp4") and spec.product != "scaled"
    return TILE_OF_COPIES if copies else TILES[spec.product]


def _how(spec: GemmSpec, tile: Tile) -> dict[str, Any]:
    return {
        "SCALING": spec.scaling,
        "A_FORMAT": spec.left_format,
        "B_FORMAT": spec.right_format,
        "SCALES": spec.scales,
        "BLOCK": spec.block,
        "PRODUCT": spec.product,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
    }


def rows_by_matrices(
    spec: GemmSpec,
    left: Planes,
    right: Planes,
    table: Tensor,
    bias: Tensor | None,
    bias_scales: Tensor | None,
    out: Tensor,
) -> None:
    """fprop and dgrad into `out`."""
    a, b = left.data, right.data
    rows, depth, columns, groups = a.shape[0], a.shape[1], out.shape[1], b.shape[0]
    turned = spec.gemm == "dgrad"
    b_depth, b_column = (b.stride(1), b.stride(2)) if turned else (b.stride(2), b.stride(1))
    panels = panels_of(rows, groups)
    of_bias = (0, 0) if bias is None else bias.stride()
    of_scales = 0 if bias_scales is None else bias_scales.stride(0)
    tile = tile_of(spec)
    arguments = (
        *left.arguments, *right.arguments, None if bias is None else stored(bias), bias_scales, stored(out), table,
        rows, depth, columns, groups, panels, *a.stride(), b.stride(0), b_depth, b_column, *out.stride(),
        *of_bias, of_scales,
    )  # fmt: skip
    start(
        rows_times_matrices, (panels, tiles(columns, tile.columns)), out, arguments,
        A_DTYPE=DTYPE_NAMES.get(a.dtype), B_DTYPE=DTYPE_NAMES.get(b.dtype), OUT_DTYPE=DTYPE_NAMES[out.dtype],
        BIAS_DTYPE=None if bias is None else DTYPE_NAMES[bias.dtype], SQUARE=spec.square, TURNED=turned,
        **_how(spec, tile),
    )  # fmt: skip


def columns_by_columns(spec: GemmSpec, left: Planes, right: Planes, table: Tensor, out: Tensor) -> None:
    """wgrad into `out`."""
    a, b = left.data, right.data
    groups, height, width = out.shape
    tile = tile_of(spec)
    arguments = (
        *left.arguments, *right.arguments, stored(out), table,
        height, width, groups, *a.stride(), *b.stride(), *out.stride(),
    )  # fmt: skip
    start(
        columns_times_columns, (tiles(height), tiles(width, tile.columns), groups), out, arguments,
        A_DTYPE=DTYPE_NAMES.get(a.dtype), B_DTYPE=DTYPE_NAMES.get(b.dtype), OUT_DTYPE=DTYPE_NAMES[out.dtype],
        HADAMARD=spec.hadamard, ACCUMULATE=spec.accumulate, ROWS=TILE, **_how(spec, tile),
    )  # fmt: skip
