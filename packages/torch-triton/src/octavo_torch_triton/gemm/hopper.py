"""The launches of FP8 products on Hopper: as many programs as the chip has multiprocessors, each for many tiles."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo_torch_triton.arrays.launch import described_rows, multiprocessors, start
from octavo_torch_triton.gemm.operands import Bias, Planes
from octavo_triton.kernels.hopper.columns import hopper_columns
from octavo_triton.kernels.hopper.rows import hopper_rows
from octavo_triton.layouts import TILE, panels_of, tiles
from octavo_triton.products.spec import GemmSpec
from octavo_triton.products.tiles import BESIDE

_COLUMNS = 256
_OF_CODES, _OF_SCALES = 128, 0
"""Bytes of a swizzle: what tensor cores read, and what threads read."""
_HOW: dict[str, Any] = {"BESIDE": BESIDE, "num_warps": 4, "enable_fp_fusion": True}


def rows_on_hopper(spec: GemmSpec, left: Planes, right: Planes, table: Tensor, bias: Bias, out: Tensor) -> bool:
    """fprop or dgrad into `out`; False, and nothing started, where another kernel has to."""
    if spec.chip != "sm_90" or spec.product != "fp8" or (spec.scaling == "block" and not spec.square):
        return False
    a, b = left.data, right.data
    of_a = described_rows(a, (TILE, TILE), _OF_CODES)
    of_b = described_rows(b, (_COLUMNS, TILE), _OF_CODES)
    if of_a is None or of_b is None:
        return False
    rows, depth, columns = a.shape[0], a.shape[1], out.shape[1]
    groups = b.shape[0] // tiles(depth) if spec.turned else b.shape[0]
    panels, across = panels_of(rows, groups), tiles(columns, _COLUMNS)
    arguments = (
        of_a, left.scales, of_b, right.scales, bias.data, bias.scales, table, out,
        rows, depth, columns, groups, panels, across, *out.stride(), *bias.strides,
    )  # fmt: skip
    start(hopper_rows, _grid(out, panels * across), out, arguments, SCALING=spec.scaling, TURNED=spec.turned, **_HOW)
    return True


def columns_on_hopper(spec: GemmSpec, left: Planes, right: Planes, table: Tensor, out: Tensor) -> bool:
    """wgrad into `out`; False, and nothing started, where another kernel has to."""
    if spec.chip != "sm_90" or spec.product != "fp8":
        return False
    groups, height, width = out.shape
    of_a = described_rows(left.data, (TILE, TILE), _OF_CODES)
    of_b = described_rows(right.data, (_COLUMNS, TILE), _OF_CODES)
    scales: list[Any] = [left.scales, right.scales]
    if spec.scaling == "block":
        blocks = ((1, TILE), (1, _COLUMNS))
        scales = [described_rows(scale, block, _OF_SCALES) for scale, block in zip(scales, blocks, strict=True)]
    if of_a is None or of_b is None or None in scales:
        return False
    down, across = tiles(height), tiles(width, _COLUMNS)
    arguments = (
        of_a, scales[0], of_b, scales[1], table, out, height, width, groups, down, across, *out.stride(),
    )  # fmt: skip
    how = {"SCALING": spec.scaling, "ACCUMULATE": spec.accumulate}
    start(hopper_columns, _grid(out, groups * down * across), out, arguments, **how, **_HOW)
    return True


def _grid(like: Tensor, count: int) -> tuple[int]:
    return (min(multiprocessors(like.device.index), count),)
