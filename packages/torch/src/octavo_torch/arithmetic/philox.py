"""Philox4x32-10 in int64 torch arithmetic.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011); constants of Random123.
torch has no 32x32 -> 64 bit unsigned product: int64 products wrap modulo 2^64, whose bits are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output words 0 to 3 (int64 in [0, 2^32)) for broadcastable int64 counter words.

    seed   0-dimensional int64 tensor, taken modulo 2^64: its low half is key word 0, its high half word 1
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def block_draws(outer: Tensor, block: Tensor, group: Tensor, *, operand: int, stream: int, seed: Tensor) -> Tensor:
    """Sixteen 16-bit draws for each 16-element block: int32 [..., 16].

    outer, block, group   int64, broadcastable to the blocks: outer row (or column), block index, group number
    operand               0 X, 1 W, 2 dY; stream 0 row data, 1 column data
    Element i takes half i // 8, word (i mod 8) // 2, the low 16 bits when i is even.
    """
    half = torch.arange(2, device=outer.device) + (8 * operand + 2 * stream)
    words = philox4x32((outer.unsqueeze(-1), block.unsqueeze(-1), half, group.unsqueeze(-1)), seed)
    packed = torch.stack(words, dim=-1)
    halves = torch.stack((packed & 0xFFFF, packed >> 16), dim=-1).to(torch.int32)
    return halves.flatten(-3)
