"""Blocks: one matrix of a quantized file as codes and scales, whatever blocks the scales belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_torch.arithmetic.casts import e8m0_to_float, from_codes
from octavo_torch.arrays.interleaving import to_halves

MXFP4 = 1, 32
"""Rows and columns that share a scale in MXFP4."""


@dataclass(frozen=True)
class Blocks:
    """A matrix [R, K]: value = fl(code * scale), with a factor fl(code * fl(scale * factor)).

    codes    [R, K] float8_e4m3fn, float8_e5m2, or uint8 with one E2M1 code per byte
    scale    [ceil(R / r), ceil(K / c)] decode scales: float32, uint8 (E8M0) or float8_e4m3fn
    block    (r, c), the rows and columns that share a scale
    factor   fp32 scalar, NVFP4's second level, or None
    """

    codes: Tensor
    scale: Tensor
    block: tuple[int, int]
    factor: Tensor | None = None

    def values(self) -> Tensor:
        """fp32 [R, K]."""
        rows, columns = self.codes.shape
        r, c = self.block
        scale = self.multipliers().repeat_interleave(r, 0)[:rows].repeat_interleave(c, 1)[:, :columns]
        return from_codes(self.codes) * scale

    def multipliers(self) -> Tensor:
        """fp32 values of the scales, with the factor."""
        if self.scale.dtype is torch.uint8:
            return e8m0_to_float(self.scale)
        scale = from_codes(self.scale) if self.scale.dtype is torch.float8_e4m3fn else self.scale
        return scale if self.factor is None else scale * self.factor

    def by_rows(self) -> Blocks:
        """The same matrix with scales of single rows."""
        scale = as_bytes(self.scale).repeat_interleave(self.block[0], 0)[: self.codes.shape[0]]
        return Blocks(self.codes, scale.view(self.scale.dtype), (1, self.block[1]), self.factor)

    def rows(self, start: int, stop: int) -> Blocks:
        """Rows start to stop."""
        r, c = self.block
        codes, last = self.codes[start:stop], self.codes.shape[0]
        if start % r == 0 and (stop % r == 0 or stop == last):
            return Blocks(codes, self.scale[start // r : -(-stop // r)], (r, c), self.factor)
        return Blocks(codes, self.by_rows().scale[start:stop], (1, c), self.factor)

    def alternate(self) -> Blocks:
        """Rows of an even number first, then those of an odd one; for scales of single rows."""
        codes, scale = (to_halves(as_bytes(one)[None], 1)[0].view(one.dtype) for one in (self.codes, self.scale))
        return Blocks(codes, scale, self.block, self.factor)

    def scale_of(self, unit: tuple[int, int]) -> Tensor | None:
        """Scales of units of (rows, columns), in the dtype that they have; None where a unit has several."""
        if unit == self.block:
            return self.scale
        across = _across(as_bytes(self.by_rows().scale), self.block[1], unit[1], self.codes.shape[1])
        down = None if across is None else _merged(across.T, unit[0])
        return None if down is None else down.T.contiguous().view(self.scale.dtype)


def join(parts: Sequence[Blocks]) -> Blocks:
    """Matrices with equal blocks, one below the other."""
    if len(parts) == 1:
        return parts[0]
    factor = parts[0].factor
    if factor is not None and any(not torch.equal(factor, part.factor) for part in parts if part.factor is not None):
        # the scales of one matrix have one factor: fl(scale * factor) keeps every value
        parts = [Blocks(part.codes, part.multipliers(), part.block) for part in parts]
        factor = None
    if any(part.codes.shape[0] % part.block[0] for part in parts[:-1]):
        parts = [part.by_rows() for part in parts]
    codes, scale = (
        torch.cat([as_bytes(value) for value in values]).view(values[0].dtype)
        for values in ([part.codes for part in parts], [part.scale for part in parts])
    )
    return Blocks(codes, scale, parts[0].block, factor)


def pack(codes: Tensor) -> Tensor:
    """E2M1 codes [..., K] as bytes [..., K / 2], the first of two in the low nibble."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def as_bytes(value: Tensor) -> Tensor:
    """The tensor itself, or FP8 as uint8, since few operations of torch take FP8."""
    return value.view(torch.uint8) if value.element_size() == 1 else value


def _across(scale: Tensor, have: int, want: int, columns: int) -> Tensor | None:
    """Scales [R, ceil(K / have)] as [R, ceil(K / want)]."""
    if want == have or (want >= columns and have >= columns):
        return scale
    if have >= columns or have % want == 0:
        return scale.repeat_interleave(-(-min(have, columns) // want), 1)[:, : -(-columns // want)]
    return _merged(scale, -(-want // have)) if want % have == 0 or want >= columns else None


def _merged(scale: Tensor, count: int) -> Tensor | None:
    """One of every `count` neighbours along the last axis; None where they differ."""
    length = scale.shape[1]
    count = min(max(count, 1), length)
    last = scale[:, -1:].expand(-1, -length % count)
    units = torch.cat((scale, last), 1).view(scale.shape[0], -1, count)
    return units[..., 0] if bool((units == units[..., :1]).all()) else None
