"""The three scale rules against rational arithmetic, and at the edges where implementations differ."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from octavo.formats import FORMAT_MAX
from octavo_numerics import cast, decode
from octavo_numerics.scales import FLT_MAX, e8m0_decode, e8m0_scales, fp32_scales, nvfp4_scales

NAN_BITS = 0x7FC00000


def f32(*values: Any) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def patterns(*bits: int) -> np.ndarray:
    return np.array(bits, dtype=np.uint32).view(np.float32)


def any_amax(rng: np.random.Generator, count: int) -> np.ndarray:
    """Finite non-negative patterns, every exponent as likely."""
    return rng.integers(0, 0x7F800000, count, dtype=np.uint32).view(np.float32)


def test_fp32_scales_fill_the_format() -> None:
    """s = max / amax, decode = 1 / s, each rounded once."""
    encode, decode_scale = fp32_scales(f32(1, 3, 448), "e4m3")
    assert encode.tolist() == [448, np.float32(448) / np.float32(3), 1]
    assert decode_scale.tolist() == (np.float32(1) / encode).tolist()


def test_fp32_scales_of_zero_tiny_and_epsilon() -> None:
    """Zero gives 1; an overflowing quotient FLT_MAX, 2^127 as a power of two; eps is a floor, for empty units too."""
    tiny = patterns(1)
    assert fp32_scales(f32(0), "e4m3")[0].tolist() == [1]
    assert fp32_scales(tiny, "e4m3")[0].tolist() == [FLT_MAX]
    assert fp32_scales(tiny, "e4m3", power_of_two=True)[0].tolist() == [2.0**127]
    assert fp32_scales(f32(0, 0.25, 1), "e4m3", amax_epsilon=0.5)[0].tolist() == [896, 896, 448]
    assert fp32_scales(f32(0), "e4m3", amax_epsilon=1e-60)[0].tolist() == [1]
    with pytest.raises(ValueError, match="amax_epsilon=1e\\+39 is past fp32's largest value"):
        fp32_scales(f32(1), "e4m3", amax_epsilon=1e39)


def test_a_power_of_two_scale_never_exceeds_the_exact_one(rng: np.random.Generator) -> None:
    """Its mantissa is 0 and it lies in (s / 2, s]."""
    amax = any_amax(rng, 4096)
    exact, _ = fp32_scales(amax, "e5m2")
    power, _ = fp32_scales(amax, "e5m2", power_of_two=True)
    assert not (power.view(np.uint32) & 0x7FFFFF).any()
    assert (power <= exact).all()
    assert (power.astype(np.float64) * 2 > exact).all()


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_e8m0_is_the_smallest_sufficient_power(fmt: Any, rng: np.random.Generator) -> None:
    """b is the least byte with 2^(b-127) >= fl(amax * fl(1 / max)), by search over all bytes."""
    amax = np.concatenate([any_amax(rng, 500), f32(0), patterns(1, 0x04600001, 0x04600000, 0x7F7FFFFF)])
    encode, byte = e8m0_scales(amax, fmt)
    target = amax * (np.float32(1) / np.float32(FORMAT_MAX[fmt]))
    powers = [Fraction(2) ** (b - 127) for b in range(255)]
    expected = [next(b for b, power in enumerate(powers) if power >= Fraction(float(t))) for t in target]
    assert byte.tolist() == expected
    assert [Fraction(float(e)) for e in encode] == [Fraction(2) ** (127 - b) for b in expected]
    assert [Fraction(float(d)) for d in e8m0_decode(byte)] == [powers[b] for b in expected]


def test_e8m0_saturates_by_one_rounding_at_most(rng: np.random.Generator) -> None:
    """amax 0x04600001 is the one E4M3 mantissa whose block rounds past 448; no other amax does."""
    amax = np.concatenate([any_amax(rng, 20_000), patterns(0x04600001)])
    encode, _ = e8m0_scales(amax, "e4m3")
    past = (amax * encode) > 448
    assert past[-1]
    assert (amax[past] * encode[past] == np.nextafter(np.float32(448), FLT_MAX)).all()


def test_nvfp4_follows_its_steps_one_by_one(rng: np.random.Generator) -> None:
    """Every operation written out in numpy scalars, on blocks whose decode scale lies a few ulp around a tie."""
    groups, ulps = 60, np.arange(-3, 4)
    group_amax = np.exp2(rng.uniform(-130, 100, groups)).astype(np.float32)
    group = np.repeat(np.arange(groups), ulps.size)
    one, sixth = np.float32(1), np.float32(1) / np.float32(6)
    with np.errstate(over="ignore", divide="ignore"):
        second = np.minimum(np.float32(2688) / group_amax, FLT_MAX)
        tie = np.float32(2.0) ** rng.integers(-4, 8, groups) * (17 + 2 * rng.integers(0, 8, groups)) / np.float32(16)
        near = (tie.astype(np.float32) / (second * sixth)).view(np.int32)[:, None] + ulps
        block = near.astype(np.int32).view(np.float32).reshape(-1, 1)
        encode, code, factor = nvfp4_scales(block, group_amax, group)
        for row, g in enumerate(group):
            expected = cast(np.atleast_1d(min(block[row, 0] * (second[g] * sixth), FLT_MAX)), "e4m3")
            assert code[row] == expected
            d = decode(expected, "e4m3")[0]
            assert encode[row, 0] == min(one / (d * (one / second[g])), FLT_MAX)
            assert factor[g] == one / second[g]
    assert len(set(code.ravel().tolist())) > 10


def test_nvfp4_of_zero_blocks_and_groups() -> None:
    """A zero group has S = 1; a zero block d = 0 and the largest encode scale; a tiny group S = FLT_MAX."""
    encode, code, factor = nvfp4_scales(f32(0, 0, 1)[:, None], f32(0, 1), np.array([0, 1, 1]))
    assert code.ravel().tolist()[:2] == [0, 0]
    assert encode.ravel().tolist()[:2] == [FLT_MAX, FLT_MAX]
    assert factor[0] == 1
    assert nvfp4_scales(patterns(1)[:, None], patterns(1), np.array([0]))[2][0] == np.float32(1) / FLT_MAX


@pytest.mark.parametrize("bad", [np.inf, np.nan, -np.nan])
def test_non_finite_units_get_canonical_nan(bad: float) -> None:
    """fp32 0x7FC00000, E8M0 0xFF, E4M3 0x7F; NVFP4 poisons every block of the group."""
    amax = np.abs(f32(bad, 1))
    for scales in fp32_scales(amax, "e4m3"):
        assert scales.view(np.uint32)[0] == NAN_BITS
        assert np.isfinite(scales[1])
    encode, byte = e8m0_scales(amax, "e4m3")
    assert byte[0] == 0xFF
    assert np.isnan(encode[0])
    assert e8m0_decode(byte).view(np.uint32)[0] == NAN_BITS
    encode, code, factor = nvfp4_scales(f32(1, 0, 1)[:, None], np.abs(f32(bad, 1)), np.array([0, 0, 1]))
    assert code.ravel()[:2].tolist() == [0x7F, 0x7F]
    assert code.ravel()[2] != 0x7F
    assert np.isnan(encode.ravel()[:2]).all()
    assert factor.view(np.uint32)[0] == NAN_BITS


@pytest.mark.parametrize(("fmt", "lost"), [("e4m3", 0x04600001), ("e5m2", 0x07E00001)])
def test_powers_of_two_of_blocks_are_those_of_e8m0(fmt: Any, lost: int, rng: np.random.Generator) -> None:
    """MXFP8 with folded products has its scales by the rule of blocks, which is E8M0's but for 0 and for the one amax
    whose E8M0 product rounds down: around every max 2^k, where the next power of two begins, and at both ends."""
    around = 0x00600000 + (np.arange(254) << 23)[:, None] + np.arange(-64, 65)
    ends = np.concatenate([np.arange(1, 1 << 12), 0x7F7FFFFF - np.arange(1 << 12), around.reshape(-1)])
    amax = np.concatenate([ends.astype(np.uint32).view(np.float32), any_amax(rng, 1 << 16)])
    encode, decode_scale = fp32_scales(amax, fmt, power_of_two=True)
    of_mx, byte = e8m0_scales(amax, fmt)
    other = (encode != of_mx) | (decode_scale != e8m0_decode(byte))
    other &= amax != 0
    assert set(amax[other].view(np.uint32).tolist()) == {lost}
    assert (decode_scale[other] == 2 * e8m0_decode(byte[other])).all()
