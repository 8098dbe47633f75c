"""Stochastic rounding by position: the torch form of octavo_numerics' `rounding_bits` and `round_stochastic`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from octavo_torch.arithmetic.casts import bits_of
from octavo_torch.arithmetic.philox import philox4x32

MASTER, FIRST_MOMENT, SECOND_MOMENT = range(3)
"""Streams: which of a parameter's arrays the bits are for."""

_PER_COUNTER = 8
_NAN = 0x7FC0


class Draws(NamedTuple):
    """What the random bits of one parameter in one step depend on, apart from the position.

    seed    0-dimensional int64 tensor
    step    0-dimensional int64 tensor, the first step being 1
    tensor  the parameter's number in its optimizer
    """

    seed: Tensor
    step: Tensor
    tensor: int


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor's rows of its last axis, and their length; a scalar is one row of one element."""
    columns = shape[-1] if shape else 1
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, columns


def rounding_bits(parameter: Tensor, draws: Draws, stream: int) -> Tensor:
    """The 16 random bits of each element of a parameter on this rank: int32 [rows, columns].

    A shard of a DTensor gets the bits of its elements in the whole, so that sharding changes none.
    """
    shape, first = tuple(parameter.shape), (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        local, first = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
        row, columns = _rows(tuple(local), tuple(first), shape, parameter.device), local[-1]
    else:
        rows, columns = rows_and_columns(shape)
        row = torch.arange(rows, device=parameter.device)
    begin = first[-1] if first else 0
    block = torch.arange(begin // _PER_COUNTER, -(-(begin + columns) // _PER_COUNTER), device=parameter.device)
    last = torch.full((), (1 << 31) + 4 * draws.tensor + stream, dtype=torch.int64, device=parameter.device)
    words = torch.stack(philox4x32((row.unsqueeze(1), block, draws.step, last), draws.seed), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1).to(torch.int32)
    skipped = begin % _PER_COUNTER
    return halves.view(row.numel(), _PER_COUNTER * block.numel())[:, skipped : skipped + columns]


def _rows(local: tuple[int, ...], first: tuple[int, ...], whole: tuple[int, ...], device: torch.device) -> Tensor:
    """The numbers in the whole tensor of a shard's rows: int64 [rows]."""
    rows = torch.zeros((1,), dtype=torch.int64, device=device)
    for size, offset, extent in zip(local[:-1], first[:-1], whole[:-1], strict=True):
        along = torch.arange(offset, offset + size, device=device)
        rows = (rows.unsqueeze(1) * extent + along).flatten()
    return rows


def round_stochastic(values: Tensor, random: Tensor) -> Tensor:
    """fp32 `values` as bf16: up in magnitude where the lower 16 bits and the 16 random bits carry.

    Infinities stay, and every NaN is 0x7FC0.
    """
    bits = bits_of(values)
    odd = torch.where(values.isnan(), _NAN, bits >> 16)
    rounded = torch.where(values.isfinite(), (bits + random.view(values.shape)) >> 16, odd)
    return rounded.to(torch.int16).view(torch.bfloat16)
