"""What a quantizer starts: one pass for blocks; amax, scales and codes where units reach over many tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo_torch.plugin_api import DTYPE_NAMES
from octavo_torch_triton.arrays.launch import as_rows, has_fp8_casts, start, stored
from octavo_triton.kernels.quantize_blocks import quantize_blocks
from octavo_triton.kernels.quantize_nvfp4 import hadamard_amax, nvfp4_factors, quantize_nvfp4
from octavo_triton.kernels.quantize_units import quantize_units, unit_amax, unit_scales
from octavo_triton.layouts import TILE, panels_of, pattern, tiles

_SIZE = 1024


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

    @property
    def grid(self) -> tuple[int]:
        """Panels times tiles of columns."""
        return (self.panels * tiles(self.columns),)

    @property
    def grid_by_panels(self) -> tuple[int, int]:
        """Panels by tiles of columns. To work a tile's place out of one number takes registers, which MXFP8 does not
        have: it is a fifth slower so on an H200."""
        return self.panels, tiles(self.columns)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The arguments that all kernels over panels take."""
        return self.columns, self.groups, self.panels, self.matrix_rows, self.stride


def _warps(like: Tensor, fewest: int) -> int:
    """Of a kernel over panels. Maxima of columns cross warps, so few are fastest: on an H200 four times as many take up
    to twice as long. Square blocks have no such maxima. Chips that round to FP8 in integers have no registers for so
    few."""
    return fewest if has_fp8_casts(like) else 2 * fewest


def blocks(spec: QuantizerSpec, rows: Rows, planes: dict[str, Tensor], turned: bool) -> None:
    """Block scaling and MXFP8, square or not."""
    row_scale, column_scale = planes.get("rowwise_scale"), planes.get("columnwise_scale")
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
        quantize_blocks, rows.grid if spec.block_size == TILE else rows.grid_by_panels, rows.x, arguments,
        DTYPE=rows.dtype, FORMAT=spec.format, SCALES=spec.scale_format, POWER_OF_TWO=spec.power_of_two,
        BLOCK=spec.block_size, SQUARE=spec.square, TURNED=turned,
        STACKED=rows.table is None, CAST=has_fp8_casts(rows.x), num_warps=_warps(rows.x, 8 if spec.square else 4),
    )  # fmt: skip


def nvfp4(
    spec: QuantizerSpec, rows: Rows, planes: dict[str, Tensor], seed: Tensor | None, operand: int, group_offset: int
) -> None:
    """NVFP4: amax by group, of column data after their transform; then both planes in one pass."""
    how = {"DTYPE": rows.dtype, "STACKED": rows.table is None}
    of_amax = {**how, "APART": False, "num_warps": _warps(rows.x, 4)}
    amaxes: dict[str, Tensor] = {}
    plain: Tensor | None = None
    for direction in ("rowwise", "columnwise"):
        if direction not in planes:
            continue
        turned = spec.hadamard and direction == "columnwise"
        of_groups = None if turned else plain
        if of_groups is None:
            of_groups = torch.zeros(rows.groups, dtype=torch.int32, device=rows.x.device)
            if turned:
                start(hadamard_amax, rows.grid, rows.x, (rows.x, rows.table, of_groups, *rows.shape), **of_amax)
            else:
                plain = of_groups
                start(unit_amax, rows.grid, rows.x, (rows.x, rows.table, plain, None, None, *rows.shape), **of_amax)
        amaxes[direction] = of_groups
        size = max(16, 1 << (rows.groups - 1).bit_length())
        start(nvfp4_factors, (1,), rows.x, (of_groups, planes[f"{direction}_global"], rows.groups), SIZE=size)
    directions = ("rowwise", "columnwise")
    measured = (amaxes.get(direction) for direction in directions)
    made = (planes.get(direction + part) for direction in directions for part in ("", "_scale"))
    start(
        quantize_nvfp4, rows.grid, rows.x,
        (rows.x, *measured, rows.table, seed, *made, *rows.shape, group_offset, operand),
        SQUARE=spec.square, HADAMARD=spec.hadamard, STOCHASTIC=seed is not None, **how, num_warps=_warps(rows.x, 8),
    )  # fmt: skip


def units(spec: QuantizerSpec, rows: Rows, planes: dict[str, Tensor], scale: Tensor | None, turned: bool) -> None:
    """Delayed scaling from `scale`, fp32 [G]; current and row scaling from amaxes."""
    encode = None if scale is None else scale.to(torch.float32).contiguous()
    amaxes: dict[str, Tensor] = {}
    if encode is None:
        amaxes = {
            direction: torch.zeros(planes[f"{direction}_scale"].numel(), dtype=torch.int32, device=rows.x.device)
            for direction in ("rowwise", "columnwise")
            if f"{direction}_scale" in planes
        }
    of_groups = next(iter(amaxes.values())) if spec.scaling == "current" else None
    of_rows, of_columns = (amaxes.get("rowwise"), amaxes.get("columnwise")) if spec.scaling == "row" else (None, None)
    epsilon = pattern(spec.amax_epsilon)
    how = {"DTYPE": rows.dtype, "STACKED": rows.table is None, "num_warps": _warps(rows.x, 4)}
    if amaxes:
        measured = (rows.x, rows.table, of_groups, of_rows, of_columns, *rows.shape)
        start(unit_amax, rows.grid, rows.x, measured, **how, APART=False)
    rule = {"FORMAT": spec.format, "POWER_OF_TWO": spec.power_of_two}
    for direction in ("rowwise", "columnwise"):
        if f"{direction}_scale" not in planes:
            continue
        decode = planes[f"{direction}_scale"]
        count = decode.numel()
        start(
            unit_scales, (tiles(count, _SIZE),), rows.x, (amaxes.get(direction), encode, decode, count, epsilon),
            **rule, GIVEN=encode is not None, SIZE=_SIZE,
        )  # fmt: skip
    codes = planes.get("rowwise"), planes.get("columnwise")
    arguments = (rows.x, encode, of_groups, of_rows, of_columns, rows.table, *codes, *rows.shape, epsilon)
    start(quantize_units, rows.grid, rows.x, arguments, **rule, TURNED=turned, CAST=has_fp8_casts(rows.x), **how)
