"""The reference backend's integer arithmetic against IEEE hardware and ml_dtypes, on devices that flush subnormals."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import octavo_numerics
from octavo import QuantizerSpec
from octavo.formats import FORMAT_MAX, Format
from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arithmetic import casts, scales

N = 200_000


def _pairs(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Finite magnitudes of any exponent; products and quotients land in every range, subnormals included."""
    a = rng.integers(0, 0x7F800000, N).astype(np.uint32)
    b = rng.integers(0, 0x7F800000, N).astype(np.uint32)
    near = np.clip(253 - (a >> 23).astype(np.int64) + rng.integers(-130, 3, N), 0, 254).astype(np.uint32)
    b[::2] = ((near << 23) | (b & 0x7FFFFF))[::2]
    a[::7] &= 0x7FFFFF
    b[::11] &= 0x7FFFFF
    # Significands of 13 bits: their products often lie exactly between two fp32 numbers.
    a[::3] &= np.uint32(0xFFFFF800)
    b[::3] &= np.uint32(0xFFFFF800)
    return a, b


def test_multiply_and_divide_are_ieee(rng: np.random.Generator) -> None:
    """fl(a * b) and fl(a / b) with subnormal operands and results, where XLA:CPU flushes both."""
    a, b = _pairs(rng)
    with np.errstate(all="ignore"):
        product = (a.view(np.float32) * b.view(np.float32)).view(np.uint32)
        quotient = (a.view(np.float32) / b.view(np.float32)).view(np.uint32)
    assert np.array_equal(jax.jit(fp32.multiply)(a, b), product)
    defined = a != 0
    assert np.array_equal(np.asarray(jax.jit(fp32.divide)(a, b))[defined], quotient[defined])


def test_quotients_next_to_a_midpoint(rng: np.random.Generator) -> None:
    """1 / b for every significand of b's upper 12 bits, and for results on the subnormal grid's midpoints."""
    b = np.concatenate(
        [np.arange(0x3F800000, 0x40000000, 2048), rng.integers(0x7E000000, 0x7F800000, N), [0x7F000001, 0x7F7FFFFF]]
    ).astype(np.uint32)
    with np.errstate(all="ignore"):
        wanted = (np.float32(1) / b.view(np.float32)).view(np.uint32)
    assert np.array_equal(jax.jit(fp32.divide)(fp32.ONE, b), wanted)


def _around_thresholds(rng: np.random.Generator, fmt: Format) -> np.ndarray:
    """Finite magnitudes: of every exponent those next to the format's largest significand, and others."""
    top = int(np.float32(FORMAT_MAX[fmt]).view(np.uint32)) & 0x7FFFFF
    near = (np.arange(255)[:, None] << 23) + np.clip(top + np.arange(-3, 4), 0, 0x7FFFFF)
    edges = [0, 1, 0x7FFFFF, 0x7F7FFFFF, *(np.arange(255) << 23)]
    return np.concatenate([near.ravel(), edges, rng.integers(0, 0x7F800000, N)]).astype(np.uint32)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m1"])
def test_scales_that_are_powers_of_two(fmt: Format, rng: np.random.Generator) -> None:
    """The integer difference of bits has the exponent of the rounded quotient and of the rounded product, the one amax
    whose product rounds down to 2^-127 included."""
    amax = _around_thresholds(rng, fmt)
    top = np.float32(FORMAT_MAX[fmt])
    with np.errstate(all="ignore"):
        needed = amax.view(np.float32) * (np.float32(1) / top)
        quotient = np.minimum(top / amax.view(np.float32), np.finfo(np.float32).max)
    fraction, exponent = np.frexp(needed.astype(np.float64))
    byte = np.where(needed == 0, 0, np.maximum(exponent + 127 - (fraction == 0.5), 0))
    encode, stored = jax.jit(scales.e8m0, static_argnums=1)(amax, fmt)
    assert np.array_equal(stored, byte)
    assert np.array_equal(encode, (254 - byte).astype(np.uint32) << 23)
    if fmt == "e2m1":  # no recipe makes fp32 scales for it
        return
    spec = QuantizerSpec(format=fmt, scaling="block", power_of_two=True)
    encode, stored = jax.jit(scales.from_amax, static_argnums=1)(amax, spec)
    powers = np.where(amax == 0, np.uint32(0x3F800000), quotient.view(np.uint32) & 0x7F800000)
    assert np.array_equal(encode, powers)
    assert np.array_equal(np.asarray(stored).view(np.uint32), (1 / powers.view(np.float32)).view(np.uint32))


def test_products_with_powers_of_two(rng: np.random.Generator) -> None:
    """The significand stays: what `scaled` computes, for every power of two that an encode scale can be."""
    magnitude = rng.integers(0, 0x7F800000, N).astype(np.uint32)
    magnitude[::5] &= 0x7FFFFF
    power = rng.integers(1, 255, N).astype(np.uint32) << 23
    assert np.array_equal(jax.jit(fp32.scaled_by_power)(magnitude, power), jax.jit(fp32.scaled)(magnitude, power))


def test_numbers_are_split_as_arrays_are(rng: np.random.Generator) -> None:
    """A dividend or a factor that is known while a program is traced gives the bits that one in an array gives."""
    a, _ = _pairs(rng)
    for number in (fp32.ONE, fp32.constant(448.0), fp32.constant(float(np.float32(1) / np.float32(6)))):
        same = np.full_like(a, number)
        quotient, product = jax.jit(partial(fp32.divide, number)), jax.jit(partial(fp32.multiply, b=number))
        assert np.array_equal(quotient(a), jax.jit(fp32.divide)(same, a))
        assert np.array_equal(product(a), jax.jit(fp32.multiply)(a, same))


def test_add_is_ieee(rng: np.random.Generator) -> None:
    """Sums of numbers of both signs and any exponent, cancellation into subnormals included."""
    a, b = _pairs(rng)
    signs = rng.integers(0, 2, (2, N), np.uint32) << 31
    near = rng.random(N) < 0.5
    b = np.where(near, a ^ rng.integers(0, 1 << 10, N, np.uint32), b)
    a, b = a | signs[0], b | signs[1]
    with np.errstate(all="ignore"):
        wanted = (a.view(np.float32) + b.view(np.float32)).view(np.uint32)
    assert np.array_equal(jax.jit(fp32.add)(a, b), wanted)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m1"])
def test_casts(fmt: Format, rng: np.random.Generator) -> None:
    """Every bf16 value, both sides of every midpoint, and random patterns (faults.md 56)."""
    grid = octavo_numerics.decode(np.arange(8 if fmt == "e2m1" else 0x7C, dtype=np.uint8), fmt)
    middles = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32).view(np.uint32)
    patterns = np.concatenate(
        [np.arange(0, 0x7F80) << 16, middles, middles - 1, middles + 1, rng.integers(0, 0x7F800001, N)]
    ).astype(np.uint32)
    wanted = octavo_numerics.cast(patterns.view(np.float32), fmt)
    got = jax.jit(casts.nearest, static_argnums=1)(patterns, fmt)
    assert np.array_equal(np.asarray(got), wanted.astype(np.uint32))


def test_half_precision_inputs_widen_exactly() -> None:
    """All 65536 patterns of fp16 and of bf16, NaN payloads aside."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        x = patterns.view(dtype)
        wanted = x.astype(np.float32)
        number = ~np.isnan(wanted)
        got = np.asarray(jax.jit(fp32.widened)(jnp.asarray(x)))
        assert np.array_equal(got[number], wanted.view(np.uint32)[number])
        assert np.all((got[~number] & 0x7FFFFFFF) > 0x7F800000)
