"""The match column: our codes and scales beside the definition's, bit for bit, before anything is timed.

The small problem has an empty group, one of one row, sizes beside a panel's, and a tail of NaN that may not be read.
Outputs are poisoned first. For SwiGLU the definition quantizes the activations as the kernel rounded them, since it
is the quantizer that is exact.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

import octavo_numerics
from octavo.formats import DType
from octavo.quantizer import Direction
from octavo_bench.quantize.case import Case
from octavo_bench.quantize.problem import Plane, Problem, Setting, quantize_problem
from octavo_bench.quantize.row import EQUAL

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]

SIZES = (129, 0, 1, 96, 130)
ROWS = sum(SIZES) + 37
COLS = 272
STACKED = (3, 200, COLS)


def check_match(case: Case, dtype: DType, device: str, seed: int) -> str:
    """`EQUAL`, the first difference, or "-" for a case that has no definition to compare with."""
    if case.kind not in ("quantize", "weights"):
        return "-"
    groups, matrix_rows, _ = STACKED
    stacked = case.kind == "weights"
    setting = Setting(
        rows=groups * matrix_rows if stacked else ROWS,
        cols=COLS,
        sizes=(matrix_rows,) * groups if stacked else SIZES,
        dtype=dtype,
        device=device,
        matrix_rows=matrix_rows if stacked else 0,
        seed=seed,
    )
    x = setting.draw(2 * COLS if case.swiglu else COLS, seed)
    x[sum(setting.sizes) :] = torch.nan
    problem = quantize_problem(case, setting, x, keep_activated=case.swiglu)
    problem.call()
    return _compare(case, setting, x if problem.activated is None else problem.activated, problem)


def _compare(case: Case, setting: Setting, quantized: Any, problem: Problem) -> str:
    expected = octavo_numerics.quantize(
        _as_numpy(quantized).reshape(STACKED if setting.matrix_rows else (setting.rows, setting.cols)),
        case.spec,
        None if setting.matrix_rows else list(setting.sizes),
        seed=int(setting.rounding_seed.item()) if case.stochastic else None,
        scale=setting.encode_scales.cpu().numpy() if case.recipe == "delayed" else None,
    )
    for direction, plane in problem.planes.items():
        codes, scales, factor = expected.plane(direction)
        pairs = {
            "codes": _codes(case, setting, direction, plane, codes),
            "scales": _scales(case, setting, direction, plane, scales),
        }
        if plane.factor is not None:
            pairs["second-level factors"] = (_bytes(plane.factor), _flat(factor))
        for name, (ours, theirs) in pairs.items():
            different = int(np.count_nonzero(ours != theirs))
            if different:
                return f"differs: {different} of {theirs.size} bytes of {direction} {name}"
    return EQUAL


def _codes(case: Case, setting: Setting, direction: Direction, plane: Plane, expected: Array) -> tuple[U8, U8]:
    ours, theirs = _bytes(plane.codes), _flat(expected).reshape(-1, setting.cols)
    if direction == "columnwise":
        sizes = [-(-size // 16) * 16 for size in setting.sizes] if case.hadamard else setting.sizes
        if not case.native:
            return ours.reshape(-1, setting.cols)[: sum(sizes)], theirs[: sum(sizes)]
        theirs = to_panels(theirs, sizes)
        theirs = _packed(theirs) if case.recipe == "nvfp4" else theirs
        return ours[: theirs.size], theirs.reshape(-1)
    used = sum(setting.sizes)
    theirs = _packed(theirs) if case.recipe == "nvfp4" and case.native else theirs
    return ours.reshape(-1, theirs.shape[1])[:used], theirs[:used]


def _scales(case: Case, setting: Setting, direction: Direction, plane: Plane, expected: Array) -> tuple[U8, U8]:
    ours, theirs = _bytes(plane.scales), _flat(expected)
    used, cols = sum(setting.sizes), setting.cols
    size = case.spec.block_size
    if size is None or case.square:
        rows = case.recipe == "row" and direction == "rowwise"
        count = 4 * used if rows else theirs.size
        return ours[:count], theirs[:count]
    width = 4 if case.recipe == "block" else 1
    if direction == "rowwise":
        theirs = theirs.reshape(-1, -(-cols // size), width)[:used]
        if case.native and case.recipe == "block":
            ours = ours.reshape(theirs.shape[1], -1, width).transpose(1, 0, 2)[:used]
        return ours.reshape(-1)[: theirs.size], theirs.reshape(-1)
    blocks = [-(-count // size) for count in setting.sizes]
    theirs = theirs.reshape(-1, cols, width)[: sum(blocks)]
    if not case.native:
        return ours[: theirs.size], theirs.reshape(-1)
    each = 128 // size
    if case.recipe == "block":
        return ours.reshape(-1, -(-cols // 4) * 4, width)[: len(theirs), :cols], theirs
    theirs = np.concatenate(
        [_blocks_in_panels(part, each) for part in np.split(theirs[..., 0], np.cumsum(blocks)[:-1])]
    )
    return ours[: theirs.size], theirs.reshape(-1)


def to_panels(codes: U8, sizes: Any) -> U8:
    """[M, C] rows in groups of `sizes` as [panels, C, 128], zeros past a group's end."""
    cols = codes.shape[1]
    panels = [np.zeros((0, cols, 128), np.uint8)]
    start = 0
    for size in sizes:
        padded = np.zeros((-(-size // 128) * 128, cols), np.uint8)
        padded[:size] = codes[start : start + size]
        panels.append(padded.reshape(-1, 128, cols).transpose(0, 2, 1))
        start += size
    return np.concatenate(panels)


def _blocks_in_panels(scales: U8, each: int) -> U8:
    """[blocks, C] of one group as [panels, C, each], zeros (the scale of a zero block) past the last block."""
    padded = np.zeros((-(-len(scales) // each) * each, scales.shape[1]), np.uint8)
    padded[: len(scales)] = scales
    return padded.reshape(-1, each, scales.shape[1]).transpose(0, 2, 1)


def _packed(codes: U8) -> U8:
    """Two E2M1 codes per byte along the last axis, the even one in the low half."""
    packed: U8 = codes[..., ::2].copy()
    packed[..., : codes.shape[-1] // 2] |= codes[..., 1::2] << 4
    return packed


def _bytes(tensor: Any) -> U8:
    values: U8 = tensor.cpu().numpy()
    return values


def _flat(array: Any) -> U8:
    values: U8 = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return values


def _as_numpy(tensor: Any) -> Array:
    if tensor.dtype is torch.bfloat16:
        values: Array = tensor.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return values
    return np.asarray(tensor.cpu().numpy())
