"""Stochastic rounding: its rule in rational arithmetic, its mean, and what its bits depend on."""

from __future__ import annotations

from fractions import Fraction
from math import floor, sqrt
from typing import SupportsIndex

import numpy as np
import pytest

from octavo import QuantizerSpec
from octavo.quantizer import Operand
from octavo_numerics import decode, dequantize, philox4x32, quantize, valid
from octavo_numerics.groups import Groups
from octavo_numerics.philox import split_seed
from octavo_numerics.rounding import cast_stochastic, random_bits

GRID = [Fraction(0), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(2), Fraction(3), Fraction(4), Fraction(6)]
SEED = 0x0123456789ABCDEF


def stochastic(orientation: str = "rowwise", **fields: object) -> QuantizerSpec:
    return QuantizerSpec.model_validate(
        {"format": "e2m1", "scaling": "nvfp4", "rounding": "stochastic", "orientation": orientation, **fields}
    )


def slow(value: float, bits: int) -> int:
    """The rule of numerics.md, in rationals."""
    sign = 8 if np.signbit(value) else 0
    v = min(abs(Fraction(value)), Fraction(6)) if np.isfinite(value) else Fraction(6)
    if v == 6:
        return sign + 7
    low = max(code for code in range(7) if GRID[code] <= v)
    part = floor(2**16 * (v - GRID[low]) / (GRID[low + 1] - GRID[low]))
    return sign + low + (part + bits >= 2**16)


def test_the_rule_is_followed_exactly(rng: np.random.Generator) -> None:
    """Values on and beside the grid, in every interval, infinite and past 6, with bits at both ends."""
    inside = rng.uniform(-7, 7, 3000).astype(np.float32)
    grid = np.array([float(g) for g in GRID], dtype=np.float32)
    edges = np.concatenate([grid, np.nextafter(grid, np.float32(9)), np.nextafter(grid, np.float32(-9)), [np.inf]])
    values = np.concatenate([inside, edges, -edges]).astype(np.float32)
    for bits in (rng.integers(0, 1 << 16, values.size, dtype=np.uint16), np.uint16(0), np.uint16(0xFFFF)):
        words = np.broadcast_to(bits, values.shape).astype(np.uint16)
        expected = [slow(float(value), int(word)) for value, word in zip(values, words, strict=True)]
        assert cast_stochastic(values, words).tolist() == expected


def test_nan_takes_the_nan_code() -> None:
    """0x7 whatever the sign and bits."""
    values = np.array([0x7FC00000, 0xFFC00001], dtype=np.uint32).view(np.float32)
    assert cast_stochastic(values, np.array([0, 0xFFFF], dtype=np.uint16)).tolist() == [7, 7]


def word(counter: tuple[int, int, int, int], i: int) -> int:
    """16 bits of element i of a block whose half-0 counter is given, one Philox call a word."""
    outer, block, stream, group = counter
    c0, c1, c2, c3 = (np.array([c], dtype=np.uint32) for c in (outer, block, stream + i // 8, group))
    words = philox4x32((c0, c1, c2, c3), split_seed(SEED))
    return int(words[i % 8 // 2][0]) >> (16 * (i % 2)) & 0xFFFF


def test_bits_are_addressed_by_position() -> None:
    """Counter words, stream, operand, half, word and 16-bit half, in both directions (numerics.md)."""
    groups = Groups(np.array([3, 0, 20], dtype=np.int64))
    row = random_bits(groups, 35, "rowwise", seed=SEED, operand="dy", group_offset=4)
    column = random_bits(groups, 35, "columnwise", seed=SEED, operand="w", group_offset=4)
    for r, c in [(0, 0), (2, 17), (3, 9), (22, 34), (20, 8)]:
        group = 0 if r < 3 else 2
        within = r if r < 3 else r - 3
        assert row[r, c] == word((within, c // 16, 8 * 2, 4 + group), c % 16)
        assert column[r, c] == word((c, within // 16, 8 * 1 + 2, 4 + group), within % 16)


def test_the_mean_is_the_value(rng: np.random.Generator) -> None:
    """Over 4096 rows of the same block the mean is x where |x e| <= 6, within 5 standard errors (faults.md 39)."""
    block = rng.uniform(-1, 1, 16).astype(np.float32)
    block[0] = 1
    x = np.tile(block, (4096, 1))
    q = quantize(x, stochastic(), seed=int(rng.integers(1 << 62)))
    values = dequantize(q).astype(np.float64)
    scale = float(decode(valid(q)["rowwise_scale"], "e4m3")[0, 0]) * float(valid(q)["rowwise_global"][0])
    inside = np.abs(block) <= 6 * scale
    assert inside.sum() >= 15
    widest_deviation = 2 * scale / 2
    limit = 5 * widest_deviation / sqrt(4096) + scale * 2.0**-15
    assert (np.abs(values.mean(axis=0) - block)[inside] <= limit).all()


def test_one_seed_repeats_and_two_differ(rng: np.random.Generator) -> None:
    """Also modulo 2^64, and with numpy integers (faults.md 40, 41)."""
    x = rng.standard_normal((33, 48)).astype(np.float32)
    seeds: tuple[SupportsIndex, ...] = (7, np.uint64(7), 7 + (1 << 64), 8)
    spec = stochastic("both", hadamard=True)
    first, again, wrapped, other = (valid(quantize(x, spec, seed=seed)) for seed in seeds)
    for name in ("rowwise", "columnwise"):
        assert np.array_equal(first[name], again[name])
        assert np.array_equal(first[name], wrapped[name])
        assert not np.array_equal(first[name], other[name])
        assert np.array_equal(first[f"{name}_scale"], other[f"{name}_scale"])


def test_operand_and_direction_have_their_own_bits(rng: np.random.Generator) -> None:
    """The same values as X, W and dY, and as rows and columns, round differently; the role is the default."""
    x = rng.standard_normal((16, 16)).astype(np.float32)
    operands: tuple[Operand, ...] = ("x", "w", "dy")
    codes = {operand: valid(quantize(x, stochastic(), seed=1, operand=operand))["rowwise"] for operand in operands}
    assert not np.array_equal(codes["x"], codes["w"])
    assert not np.array_equal(codes["x"], codes["dy"])
    assert np.array_equal(valid(quantize(x, stochastic(role="dy"), seed=1))["rowwise"], codes["dy"])
    columns = quantize(x.T, stochastic("columnwise"), seed=1).columnwise
    assert columns is not None
    assert not np.array_equal(columns.T, codes["x"])


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise"])
def test_square_blocks_share_the_row_codes_and_their_bits(orientation: str, rng: np.random.Generator) -> None:
    """A square tensor asked for columns alone gets the codes that rows would have."""
    w = rng.standard_normal((2, 20, 33)).astype(np.float32)
    both = quantize(w, stochastic("both", square=True, role="w"), seed=3)
    alone = quantize(w, stochastic(orientation, square=True, role="w"), seed=3)
    assert both.rowwise is both.columnwise
    assert np.array_equal(valid(alone)[orientation], valid(both)[orientation])
