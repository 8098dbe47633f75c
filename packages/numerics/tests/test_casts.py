"""Casts against an exact oracle that shares nothing with them, over a stratified million and over all of fp32."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from octavo.formats import FORMAT_MAX, Format
from octavo_numerics import cast, decode, round_bfloat16
from octavo_numerics.casts import PAYLOAD_DTYPE

FORMATS: tuple[Format, ...] = ("e4m3", "e5m2", "e2m1")
FIELDS: dict[Format, tuple[int, int, int]] = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}
"""Exponent bits, mantissa bits, bias, from the formats' specifications."""


def exact_values(fmt: Format) -> list[Fraction]:
    """Non-negative finite values in code order, from sign, exponent and mantissa."""
    exponent_bits, mantissa_bits, bias = FIELDS[fmt]
    values = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code % (1 << mantissa_bits)
        significand = Fraction(mantissa, 1 << mantissa_bits) + (exponent > 0)
        values.append(significand * Fraction(2) ** (max(exponent, 1) - bias))
    return [value for value in values if value <= FORMAT_MAX[fmt]]


def fp32_bits_at_or_above(value: Fraction) -> int:
    """The least pattern of a non-negative fp32 number that is not below `value`."""
    low, high = 0, 0x7F800000
    while low < high:
        middle = (low + high) // 2
        number = Fraction(float(np.uint32(middle).view(np.float32)))
        low, high = (low, middle) if number >= value else (middle + 1, high)
    return low


def first_pattern_of_each_code(fmt: Format) -> list[int]:
    """fp32 patterns are ordered as their values, so each code owns one run of patterns; ties go to the even code."""
    values = exact_values(fmt)
    starts = [0]
    for code in range(1, len(values)):
        middle = (values[code - 1] + values[code]) / 2
        start = fp32_bits_at_or_above(middle)
        exact = Fraction(float(np.uint32(start).view(np.float32))) == middle
        starts.append(start + (exact and code % 2 == 1))
    return starts


def oracle(values: np.ndarray, fmt: Format) -> np.ndarray:
    """Nearest of the format's values in float64, where differences of these numbers compare exactly."""
    table = np.array([float(value) for value in exact_values(fmt)])
    magnitude = np.minimum(np.abs(values.astype(np.float64)), table[-1])
    above = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    middle = (table[above - 1] + table[above]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    codes = np.where(up, above, above - 1) + np.signbit(values) * (8 if fmt == "e2m1" else 128)
    return np.where(np.isnan(values), 7 if fmt == "e2m1" else 127, codes).astype(np.uint8)


def stratified(rng: np.random.Generator) -> np.ndarray:
    """A million patterns: 1 900 of each sign and exponent, and neighbours of 20 000 bfloat16 values."""
    exponents = np.repeat(np.arange(512, dtype=np.uint32), 1900) << np.uint32(23)
    random = exponents | rng.integers(0, 1 << 23, exponents.size, dtype=np.uint32)
    upper = rng.integers(0, 1 << 16, 20_000, dtype=np.uint32) << np.uint32(16)
    near = np.concatenate([upper, upper + np.uint32(1), upper - np.uint32(1), upper | np.uint32(0x8000)])
    return np.concatenate([random, near]).view(np.float32)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_stratified_million_is_cast_to_the_nearest_even_code(fmt: Format, rng: np.random.Generator) -> None:
    """Round to nearest even, subnormals, saturation, signed zero, NaN."""
    values = stratified(rng)
    with np.errstate(invalid="ignore"):
        expected = oracle(values, fmt)
    assert np.array_equal(cast(values, fmt), expected)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_ml_dtypes_agrees_where_it_is_defined_alike(fmt: Format, rng: np.random.Generator) -> None:
    """A third opinion inside the finite range; outside it ml_dtypes does not saturate."""
    values = stratified(rng)
    values = values[np.abs(values) <= FORMAT_MAX[fmt]]
    assert np.array_equal(cast(values, fmt), values.astype(PAYLOAD_DTYPE[fmt]).view(np.uint8))


@pytest.mark.parametrize("fmt", FORMATS)
def test_specials(fmt: Format) -> None:
    """Infinities saturate with their sign, zeros keep it, and a NaN of any sign or payload is one code."""
    sign = 8 if fmt == "e2m1" else 128
    largest, nan = len(exact_values(fmt)) - 1, 7 if fmt == "e2m1" else 127
    bits = [0x7F800000, 0xFF800000, 0, 0x80000000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF]
    expected = [largest, sign + largest, 0, sign, nan, nan, nan, nan, largest]
    assert cast(np.array(bits, dtype=np.uint32).view(np.float32), fmt).tolist() == expected


@pytest.mark.parametrize("fmt", FORMATS)
def test_decoding_gives_the_exact_value_of_every_code(fmt: Format) -> None:
    """Every code, both signs; and casting a value gives its code back."""
    values = exact_values(fmt)
    codes = np.arange(len(values), dtype=np.uint8)
    assert [Fraction(float(value)) for value in decode(codes, fmt)] == values
    sign = np.uint8(8 if fmt == "e2m1" else 128)
    negative = decode(codes | sign, fmt)
    assert np.signbit(negative).all()
    assert np.array_equal(-negative, decode(codes, fmt))
    assert np.array_equal(cast(negative, fmt), codes | sign)


def test_codes_without_a_number() -> None:
    """E4M3's NaN patterns; E5M2's infinities and NaN patterns, which Octavo never writes but may read."""
    assert np.isnan(decode(np.array([0x7F, 0xFF], dtype=np.uint8), "e4m3")).all()
    assert decode(np.array([0x7C, 0xFC], dtype=np.uint8), "e5m2").tolist() == [np.inf, -np.inf]
    assert np.isnan(decode(np.array([0x7D, 0x7F, 0xFE], dtype=np.uint8), "e5m2")).all()


def test_rounding_to_bfloat16_keeps_subnormals_and_overflows(rng: np.random.Generator) -> None:
    """As ml_dtypes rounds, NaN aside, whose payload is not looked at."""
    values = stratified(rng)
    rounded = round_bfloat16(values)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    finite = ~np.isnan(values)
    assert np.array_equal(rounded[finite].view(np.uint32), expected[finite].view(np.uint32))
    assert np.isnan(rounded[~finite]).all()


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS)
def test_all_of_fp32_is_cast_to_the_nearest_even_code(fmt: Format) -> None:
    """All 2^32 patterns against run lengths that rational arithmetic found."""
    starts = np.array([*first_pattern_of_each_code(fmt), 0x7F800001, 0x80000000], dtype=np.int64)
    sign, nan = (8, 7) if fmt == "e2m1" else (128, 127)
    positive = np.append(np.arange(len(starts) - 2, dtype=np.uint8), np.uint8(nan))
    negative = np.append(positive[:-1] | np.uint8(sign), np.uint8(nan))
    chunk = 1 << 20
    for first in range(0, 1 << 31, chunk):
        cuts = np.clip(starts, first, first + chunk)
        runs = cuts[1:] - cuts[:-1]
        patterns = np.arange(first, first + chunk, dtype=np.uint32)
        assert np.array_equal(cast(patterns.view(np.float32), fmt), np.repeat(positive, runs)), hex(first)
        patterns |= np.uint32(0x80000000)
        assert np.array_equal(cast(patterns.view(np.float32), fmt), np.repeat(negative, runs)), hex(first)
