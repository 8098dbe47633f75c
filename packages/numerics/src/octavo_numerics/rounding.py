"""Stochastic rounding to E2M1, with bits that depend on position alone.

Element i of a 16-element block takes 16 bits of Philox4x32-10: half i // 8, word (i mod 8) // 2, the low 16 bits when
i is even. The counter is (outer, block, 8 * operand + 2 * stream + half, group), the key the seed's two words:

    row data     stream 0   outer = row within its group   block = column block
    column data  stream 1   outer = column                 block = block within its group

Source of the generator: see `philox`. Tiling, device and the other groups of a call have no part in the bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.formats import FORMAT_MAX
from octavo.quantizer import Direction, Operand
from octavo_numerics.casts import F32, NAN_CODE, U8
from octavo_numerics.groups import Groups
from octavo_numerics.philox import philox4x32, split_seed

OPERAND_NUMBER: dict[Operand, int] = {"x": 0, "w": 1, "dy": 2}

_BLOCK = 16


def _words(
    outer: npt.NDArray[np.int64],
    block: npt.NDArray[np.int64],
    group: npt.NDArray[np.int64],
    stream: int,
    operand: Operand,
    seed: int,
) -> npt.NDArray[np.uint16]:
    """16 random 16-bit words for each position of the broadcast arguments, along a new last axis."""
    half = np.arange(2, dtype=np.uint32) + np.uint32(8 * OPERAND_NUMBER[operand] + 2 * stream)
    c0, c1, c3 = (np.asarray(word, dtype=np.uint32)[..., None] for word in (outer, block, group))
    words = np.stack(philox4x32((c0, c1, half, c3), split_seed(seed)), axis=-1)
    # Little-endian words put the low 16 bits first, whatever the host's byte order.
    return words.astype("<u4").view("<u2").astype(np.uint16).reshape(*words.shape[:-2], _BLOCK)


def random_bits(
    groups: Groups, cols: int, direction: Direction, *, seed: int, operand: Operand, group_offset: int
) -> npt.NDArray[np.uint16]:
    """The 16 random bits of each element [U, C] of a plane's valid (for Hadamard data: padded) rows."""
    if direction == "rowwise":
        part = groups.whole
        blocks = np.arange(-(-cols // _BLOCK), dtype=np.int64)
        group = part.index[:, None] + group_offset
        bits = _words(part.position[:, None], blocks[None, :], group, 0, operand, seed)
        return bits.reshape(groups.rows, len(blocks) * _BLOCK)[:, :cols]
    part = groups.blocks(_BLOCK)
    first_block = np.cumsum(groups.block_counts(_BLOCK)) - groups.block_counts(_BLOCK)
    block = np.arange(len(part.group), dtype=np.int64) - first_block[part.group]
    columns = np.arange(cols, dtype=np.int64)
    bits = _words(columns[None, :], block[:, None], part.group[:, None] + group_offset, 1, operand, seed)
    return bits.transpose(0, 2, 1)[part.index, part.position]


@np.errstate(all="ignore")
def cast_stochastic(values: F32, bits: npt.NDArray[np.uint16]) -> U8:
    """E2M1 codes of fp32 `values`, rounded up in magnitude with probability (v - lo) / (hi - lo) to 16 bits.

    v = min(|value|, 6), an infinite value included; lo <= v < hi on E2M1's grid; the upper code is taken where
    floor(2^16 (v - lo) / (hi - lo)) + bits >= 2^16. Zero keeps its sign, too. Exact in fp32: every difference
    is of numbers within a factor of two, every factor a power of two.
    """
    magnitude = np.minimum(np.abs(values), np.float32(FORMAT_MAX["e2m1"]))
    two, four, half = np.float32(2), np.float32(4), np.float32(0.5)
    # Steps above 0, 2 or 4, in units of the grid's spacing there: 0.5, 1 and 2.
    upper = np.where(magnitude < four, magnitude - two, (magnitude - four) * half)
    steps = np.where(magnitude < two, magnitude * two, upper)
    base = (magnitude >= two) * np.uint32(4) + (magnitude >= four) * np.uint32(2)
    # In 1/65536 of a step the code is the upper half, and adding the bits carries into it as often as it should.
    place = (steps * np.float32(65536)).astype(np.uint32) + (base << np.uint32(16)) + bits
    code = (place >> np.uint32(16)) | (np.signbit(values) * np.uint32(8))
    return np.where(np.isnan(values), NAN_CODE["e2m1"], code).astype(np.uint8)
