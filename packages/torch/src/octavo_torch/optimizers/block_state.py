"""Moments in 8 bits, in the format of octavo_numerics' `encode_blocks` and `decode_blocks`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo_torch.arithmetic.casts import ABS_BITS, INF_BITS, NAN_BITS, bits_of, float_from
from octavo_torch.optimizers.rounding import rows_and_columns

BLOCK = 128
"""Consecutive elements of the last axis that share a top."""

NOT_FINITE = -1
"""The top of a block with an infinite or NaN element."""

LARGEST_TOP = 0x7F7
"""The top of the largest finite numbers."""

_SHIFT = 20
_SIGN = 0x80


def tops_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tops of a tensor of this shape."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def encode_into(codes: Tensor, tops: Tensor, values: Tensor, signed: bool, random: Tensor, skip: Tensor | None) -> None:
    """Writes fp32 `values` as uint8 codes and int32 tops, rounded by the 16 `random` bits of each.

    skip   a boolean tensor; where it is true nothing is written, because decoded values may get a lower top than before
    """
    levels = 127 if signed else 255
    blocks = _in_blocks(bits_of(values) & ABS_BITS)
    largest = blocks.amax(dim=-1, keepdim=True)
    finite = largest < INF_BITS
    top = ((largest + ((1 << _SHIFT) - 1)) >> _SHIFT).clamp_(max=LARGEST_TOP)
    carried = (blocks + (_in_blocks(random.reshape(values.shape)) << (_SHIFT - 16))) >> _SHIFT
    code = torch.minimum(carried, top).sub_(top).add_(levels).clamp_(min=0 if signed else 1)
    code = torch.where(finite & (blocks > 0), code, 0)
    if signed:
        code |= torch.where(code > 0, (_in_blocks(bits_of(values)) >> 24) & _SIGN, 0)
    code = _out_of_blocks(code, values.shape)
    top = torch.where(finite, top, NOT_FINITE).view(tops.shape)
    codes.copy_(code if skip is None else torch.where(skip, codes, code))
    tops.copy_(top if skip is None else torch.where(skip, tops, top))


def decode(codes: Tensor, tops: Tensor, signed: bool) -> Tensor:
    """The fp32 values of codes and tops."""
    blocks = _in_blocks(codes.to(torch.int32))
    top = tops.to(torch.int32).view(*blocks.shape[:2], 1)
    magnitude = blocks & (_SIGN - 1) if signed else blocks
    bits = torch.where(magnitude > 0, (magnitude - (127 if signed else 255) + top) << _SHIFT, 0)
    if signed:
        bits |= (blocks & _SIGN) << 24
    bits = torch.where(top == NOT_FINITE, NAN_BITS, bits)
    return float_from(_out_of_blocks(bits, codes.shape).contiguous())


def _in_blocks(values: Tensor) -> Tensor:
    """[rows, blocks, 128] with zeros past the last column."""
    rows, columns = rows_and_columns(tuple(values.shape))
    blocks = -(-columns // BLOCK)
    flat = values.reshape(rows, columns)
    return functional.pad(flat, (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)


def _out_of_blocks(blocks: Tensor, shape: tuple[int, ...]) -> Tensor:
    rows, columns = rows_and_columns(shape)
    return blocks.reshape(rows, blocks.shape[1] * BLOCK)[:, :columns].reshape(shape)
