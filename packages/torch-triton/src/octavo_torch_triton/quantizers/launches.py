"""What a quantizer starts: one pass for blocks; amax, scales and codes where units reach over many tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo_torch.plugin_api import DTYPE_NAMES
from octavo_torch_triton.arrays.launch import as_rows, has_fp8_casts, start, stored
from octavo_triton.kernels.quantizers.blocks import quantize_blocks
from octavo_triton.kernels.quantizers.nvfp4 import hadamard_amax, nvfp4_factors, quantize_nvfp4
from octavo_triton.kernels.quantizers.units import quantize_units, unit_amax
from octavo_triton.layouts import TILE, panels_of, pattern, share_of, tiles
from octavo_triton.quantizer_tiles import HADAMARD_AMAX, blocks_tile, codes_tile, nvfp4_tile


class Rows(NamedTuple):
    """The operand as kernels see it.

    x            stored values; `stride` elements from row to row
    table        of ragged rows; None for matrices of `matrix_rows` rows each
    panels       programs that cover it
    """

    x: Tensor
    stride: int
    dtype: str
    columns: int
    groups: int
    table: Tensor | None
    panels: int
    matrix_rows: int

    @classmethod
    def of(cls, x: Tensor, table: Tensor | None, groups: int) -> Rows:
        """Of [M, K] rows with a table, or of [G, N, K] matrices."""
        rows, stride = as_rows(x)
        panels = groups * tiles(x.shape[1]) if table is None else panels_of(x.shape[0], groups)
        matrix_rows = x.shape[1] if table is None else 0
        return cls(stored(rows), stride, DTYPE_NAMES[x.dtype], x.shape[-1], groups, table, panels, matrix_rows)

    def grid(self, width: int = TILE) -> tuple[int]:
        """Panels times tiles of `width` columns."""
        return (self.panels * tiles(self.columns, width),)

    @property
    def how(self) -> dict[str, Any]:
        """The constants that they take."""
        return {"DTYPE": self.dtype, "STACKED": self.table is None}

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The arguments that all kernels over panels take."""
        return self.columns, self.groups, self.panels, self.matrix_rows, self.stride


def blocks(spec: QuantizerSpec, rows: Rows, planes: dict[str, Tensor], turned: bool) -> None:
    """Block scaling and MXFP8, square or not."""
    row_scale, column_scale = planes.get("rowwise_scale"), planes.get("columnwise_scale")
    casts = has_fp8_casts(rows.x)
    tile = blocks_tile(spec, casts, rows.table is None)
    arguments: tuple[Any, ...] = (
        rows.x,
        rows.table,
        planes.get("rowwise"),
        column_scale if row_scale is None and spec.square else row_scale,
        planes.get("columnwise"),
        None if spec.square else column_scale,
        *rows.shape,
        pattern(spec.amax_epsilon),
    )
    start(
        quantize_blocks, rows.grid(tile.width), rows.x, arguments, **rows.how,
        FORMAT=spec.format, SCALES=spec.scale_format, POWER_OF_TWO=spec.power_of_two, BLOCK=spec.block_size,
        SQUARE=spec.square, TURNED=turned, CAST=casts, RUN=tile.run, WIDTH=tile.width, BESIDE=tile.beside,
        **tile.options,
    )  # fmt: skip


def nvfp4(
    spec: QuantizerSpec, rows: Rows, planes: dict[str, Tensor], seed: Tensor | None, operand: int, group_offset: int
) -> None:
    """NVFP4: amax by group, of column data after their transform; then both planes in one pass."""
    directions = [direction for direction in ("rowwise", "columnwise") if direction in planes]
    transformed = spec.hadamard and "columnwise" in planes
    largest = torch.zeros((2, rows.groups), dtype=torch.int32, device=rows.x.device)
    amaxes: dict[str, Tensor] = {
        direction: largest[int(transformed and direction == "columnwise")] for direction in directions
    }
    if transformed:
        tile = HADAMARD_AMAX
        start(
            hadamard_amax, rows.grid(tile.width), rows.x,
            (rows.x, rows.table, amaxes.get("rowwise"), amaxes["columnwise"], *rows.shape), **rows.how,
            APART=False, WIDTH=tile.width, BESIDE=tile.beside, **tile.options,
        )  # fmt: skip
    else:
        of_groups = (rows.x, rows.table, largest[0], None, None, *rows.shape)
        start(unit_amax, rows.grid(), rows.x, of_groups, **rows.how, APART=False, num_warps=4)
    size = max(16, 1 << (rows.groups - 1).bit_length())
    for direction, amax in amaxes.items():
        start(nvfp4_factors, (1,), rows.x, (amax, planes[f"{direction}_global"], rows.groups), SIZE=size)
    measured = (amaxes.get(direction) for direction in ("rowwise", "columnwise"))
    made = (planes.get(direction + part) for direction in ("rowwise", "columnwise") for part in ("", "_scale"))
    tile = nvfp4_tile(spec)
    start(
        quantize_nvfp4, rows.grid(tile.width), rows.x,
        (rows.x, *measured, rows.table, seed, *made, *rows.shape, group_offset, operand), **rows.how,
        SQUARE=spec.square, HADAMARD=spec.hadamard, STOCHASTIC=seed is not None, CAST=has_fp8_casts(rows.x),
        WIDTH=tile.width, BESIDE=tile.beside, **tile.options,
    )  # fmt: skip


def units(spec: QuantizerSpec, rows: Rows, planes: dict[str, Tensor], scale: Tensor | None, turned: bool) -> None:
    """Delayed scaling from `scale`, fp32 [G]; current and row scaling from amaxes."""
    encode = None if scale is None else scale.to(torch.float32).contiguous()
    decodes = [planes.get(f"{direction}_scale") for direction in ("rowwise", "columnwise")]
    counts = [0 if decode is None else decode.numel() for decode in decodes]
    shared = spec.scaling != "row"
    rule = {"FORMAT": spec.format, "POWER_OF_TWO": spec.power_of_two}
    epsilon = pattern(spec.amax_epsilon)
    of_groups = of_rows = of_columns = None
    if encode is None:
        amax = torch.zeros(max(counts) if shared else sum(counts), dtype=torch.int32, device=rows.x.device)
        if shared:
            of_groups = amax
        else:
            parts = zip(decodes, torch.split(amax, counts), strict=True)
            of_rows, of_columns = (None if decode is None else part for decode, part in parts)
        measured = (rows.x, rows.table, of_groups, of_rows, of_columns, *rows.shape)
        start(unit_amax, rows.grid(), rows.x, measured, **rows.how, APART=False, num_warps=4)
    codes = planes.get("rowwise"), planes.get("columnwise")
    operands = rows.x, encode, of_groups, of_rows, of_columns, rows.table
    arguments = (*operands, *codes, *decodes, *rows.shape, epsilon, *counts)
    programs = max(1, *rows.grid())  # of no rows or columns there are scales all the same
    casts = has_fp8_casts(rows.x)
    tile = codes_tile(casts)
    start(
        quantize_units, (programs,), rows.x, arguments, **rows.how, **rule, TURNED=turned, CAST=casts,
        RUN=tile.run, BESIDE=tile.beside, SHARE=share_of(max(counts), programs), **tile.options,
    )  # fmt: skip
