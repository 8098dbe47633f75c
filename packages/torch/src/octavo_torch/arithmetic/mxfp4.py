"""Weights rounded to MXFP4's values, as octavo_numerics.round_mxfp4 defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.quantizer import Direction
from octavo_torch.arithmetic.casts import ABS_BITS, bits_of, e8m0_to_float
from octavo_torch.arithmetic.groups import RowGroups
from octavo_torch.arithmetic.processor import check_subnormals
from octavo_torch.arithmetic.scales import mxfp4_scales
from octavo_torch.arithmetic.units import Spread, Units, unit_amax

_BLOCK = 32
_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 25}
"""Elements whose fp32 intermediates exist at a time: what a core's cache holds, and what fills a GPU."""


def rounded_rows(x: Tensor, groups: RowGroups, direction: Direction) -> Tensor:
    """fp32 rows `x` [M, K] in blocks of 1x32 ("rowwise"), or of 32x1 that restart at each group, as values of MXFP4."""
    units = Units("each", _BLOCK) if direction == "rowwise" else Units(_BLOCK, "each")
    spread = Spread(units, groups, x.shape[1])
    encode, byte = mxfp4_scales(unit_amax(x, groups, units))
    return _values(x, spread(encode), spread(e8m0_to_float(byte)))


def mxfp4_values(x: Tensor, sizes: Tensor | None, direction: Direction) -> Tensor:
    """bf16 `x` in MXFP4, which bf16 holds: [M, K] with bounded int64 `sizes` [G], or [G, N, K] with None."""
    if x.is_cpu:
        check_subnormals()
    if sizes is not None:
        groups = RowGroups(sizes, x.shape[0])
        rows = torch.where(groups.valid[:, None], x.to(torch.float32), 0.0)
        return rounded_rows(rows, groups, direction).to(torch.bfloat16)
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    at_once = _AT_ONCE.get(x.device.type, 1 << 25)
    matrices = max(1, at_once // max(x.shape[1] * x.shape[2], 1))
    # a matrix is cut where no block is: blocks of rows lie within a row, and others start at multiples of 32
    height = max(at_once // max(x.shape[2], 1) // _BLOCK, 1) * _BLOCK
    for first in range(0, x.shape[0], matrices):
        for start in range(0, x.shape[1], height):
            part = slice(first, first + matrices), slice(start, start + height)
            out[part].copy_(_rounded_matrices(x[part].to(torch.float32), direction))
    return out


def _rounded_matrices(x: Tensor, direction: Direction) -> Tensor:
    """fp32 matrices [G, N, K] as `rounded_rows` has them, without an index."""
    axis = 2 if direction == "rowwise" else 1
    length = x.shape[axis]
    short = -length % _BLOCK
    if short:
        x = torch.nn.functional.pad(x, (0, short) if axis == 2 else (0, 0, 0, short))
    blocks = x.reshape(*x.shape[:axis], x.shape[axis] // _BLOCK, _BLOCK, *x.shape[axis + 1 :])
    encode, byte = mxfp4_scales((bits_of(blocks) & ABS_BITS).amax(axis + 1, keepdim=True))
    values = _values(blocks, encode, e8m0_to_float(byte))
    return values.flatten(axis, axis + 1).narrow(axis, 0, length)


def _values(x: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    """E2M1's nearest to fl(x encode), times decode; scales broadcast, NaN where a block holds one.

    The grid's step is 0.5 below 2, 1 below 4 and 2 above. A tie goes to the even multiple of the step, which has the
    even code, and a zero keeps its sign.
    """
    scaled = x * encode
    size = scaled.abs()
    inverse = torch.where(size < 4.0, torch.where(size < 2.0, 2.0, 1.0), 0.5)
    return scaled.clamp_(-6.0, 6.0).mul_(inverse).round_().div_(inverse).mul_(decode)
