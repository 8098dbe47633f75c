"""Weights rounded to MXFP4's values, as octavo_numerics.round_mxfp4 defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.quantizer import Direction
from octavo_torch.arithmetic.casts import canonical_nan, e8m0_to_float, from_codes, to_e2m1
from octavo_torch.arithmetic.groups import RowGroups
from octavo_torch.arithmetic.processor import check_subnormals
from octavo_torch.arithmetic.quantize import Spread, Units, unit_amax
from octavo_torch.arithmetic.scales import mxfp4_scales, poisoned_by

_BLOCK = 32
_AT_ONCE = 1 << 24
"""Elements whose fp32 intermediates exist at a time, unless one matrix has more."""


def rounded_rows(x: Tensor, groups: RowGroups, direction: Direction) -> Tensor:
    """fp32 rows `x` [M, K] in blocks of 1x32 ("rowwise"), or of 32x1 that restart at each group, as values of MXFP4."""
    units = Units("each", _BLOCK) if direction == "rowwise" else Units(_BLOCK, "each")
    spread = Spread(units, groups, x.shape[1])
    amax = unit_amax(x, groups, units)
    encode, byte = mxfp4_scales(amax)
    codes = to_e2m1(x * spread(encode), spread(poisoned_by(amax)))
    return canonical_nan(from_codes(codes) * spread(e8m0_to_float(byte)))


def mxfp4_values(x: Tensor, sizes: Tensor | None, direction: Direction) -> Tensor:
    """bf16 `x` in MXFP4, which bf16 holds: [M, K] with bounded int64 `sizes` [G], or [G, N, K] with None."""
    if x.is_cpu:
        check_subnormals()
    if sizes is not None:
        groups = RowGroups(sizes, x.shape[0])
        rows = torch.where(groups.valid[:, None], x.to(torch.float32), 0.0)
        return rounded_rows(rows, groups, direction).to(torch.bfloat16)
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    matrices = max(1, _AT_ONCE // max(x.shape[1] * x.shape[2], 1))
    for start in range(0, x.shape[0], matrices):
        part, into = x[start : start + matrices], out[start : start + matrices]
        groups = RowGroups.stacked(part.shape[0], part.shape[1], x.device)
        rows = part.reshape(groups.rows, part.shape[2]).to(torch.float32)
        into.copy_(rounded_rows(rows, groups, direction).view(part.shape))
    return out
