"""The launches of FP8 products on Hopper: as many programs as the chip has multiprocessors, each for many tiles."""

from __future__ import annotations

from typing import Any

from jax import Array

from octavo_jax_triton.launch.arguments import Fetched, Target, even, fetched
from octavo_jax_triton.launch.start import start
from octavo_triton.kernels.hopper.columns import hopper_columns
from octavo_triton.kernels.hopper.rows import hopper_rows
from octavo_triton.layouts import TILE, panels_of, tiles
from octavo_triton.products.spec import GemmSpec
from octavo_triton.products.tiles import BESIDE

_COLUMNS = 256
_OF_CODES, _OF_SCALES = 128, 0
"""Bytes of a swizzle: what tensor cores read, and what threads read."""
_HOW: dict[str, Any] = {"BESIDE": BESIDE, "num_warps": 4, "enable_fp_fusion": True}


def rows_on_hopper(
    spec: GemmSpec, operands: tuple[Any, ...], groups: int, strides: tuple[int, ...], target: Target
) -> Array | None:
    """fprop or dgrad; None where another kernel has to.

    operands   both with their scales, bias and its scales, the result, the table
    """
    if spec.chip != "sm_90" or spec.product != "fp8" or (spec.scaling == "block" and not spec.square):
        return None
    a, a_scale, b, b_scale, bias, bias_scales, out, table = operands
    of_a, of_b = _rows(a, TILE, _OF_CODES), _rows(b, _COLUMNS, _OF_CODES)
    if of_a is None or of_b is None:
        return None
    (rows, depth), columns = a.shape, out.shape[1]
    panels, across = panels_of(rows, groups), tiles(columns, _COLUMNS)
    arguments = (
        of_a, a_scale, of_b, b_scale, bias, bias_scales, out, table,
        rows, depth, columns, groups, panels, across, *strides,
    )  # fmt: skip
    how = {"SCALING": spec.scaling, "TURNED": spec.turned, "EVEN": even(columns), **_HOW}
    return start(hopper_rows, _grid(panels * across), arguments, target, **how)[out.name]


def columns_on_hopper(spec: GemmSpec, operands: tuple[Any, ...], target: Target) -> Array | None:
    """wgrad; None where another kernel has to. `operands`: both with their scales, the result, the table."""
    if spec.chip != "sm_90" or spec.product != "fp8":
        return None
    a, a_scale, b, b_scale, out, table = operands
    groups, height, width = out.shape
    of_a, of_b = _rows(a, TILE, _OF_CODES), _rows(b, _COLUMNS, _OF_CODES)
    scales: tuple[Any, Any] = (a_scale, b_scale)
    if spec.scaling == "block":
        scales = (fetched(a_scale, (1, TILE), _OF_SCALES), fetched(b_scale, (1, _COLUMNS), _OF_SCALES))
    if of_a is None or of_b is None or scales[0] is None or scales[1] is None:
        return None
    down, across = tiles(height), tiles(width, _COLUMNS)
    strides = (height * width, width, 1)
    arguments = (
        of_a, scales[0], of_b, scales[1], out, table, height, width, groups, down, across, *strides,
    )  # fmt: skip
    how = {"SCALING": spec.scaling, "ACCUMULATE": False, "EVEN": even(height, width), **_HOW}
    return start(hopper_columns, _grid(groups * down * across), arguments, target, **how)[out.name]


def _rows(codes: Array, height: int, swizzle: int) -> Fetched | None:
    """Blocks of `height` rows of 128 codes, of an array of any axes."""
    return fetched(codes.reshape(-1, codes.shape[-1]), (height, TILE), swizzle)


def _grid(count: int) -> tuple[int]:
    from octavo_jax_triton.launch.compiled import multiprocessors

    return (min(multiprocessors(), count),)
