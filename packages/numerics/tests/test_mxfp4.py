"""Weights with MXFP4's values: what they are, how E4M3 holds them, and what is said where it does not."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo import MXFP4Weights, QuantizerSpec
from octavo_numerics import (
    dequantize,
    error_bound,
    folding_bound,
    quantize,
    round_mxfp4,
    tensor_stats,
    valid,
)
from octavo_numerics.casts import decode

E2M1 = np.arange(16, dtype=np.uint8)
GRID = decode(E2M1, "e2m1").astype(np.float64)
BYTES = np.arange(253)
"""Exponent bytes whose 6 is an fp32 number."""
APART = np.arange(21)
SPEC = MXFP4Weights().quantizer("w")
assert SPEC is not None


def by_definition(w: np.ndarray) -> np.ndarray:
    """MXFP4's values of w [..., K] in float64: the nearest of the grid, ties to the even code, scale rounded up."""
    blocks = w.astype(np.float64).reshape(-1, 32)
    amax = np.abs(blocks).max(1, keepdims=True)
    exponent = np.where(amax > 0, np.ceil(np.log2(np.where(amax > 0, amax, 1) / 6)), -127).clip(-127, 125)
    scaled = np.abs(blocks) * 2.0**-exponent
    step = np.where(scaled < 2, 0.5, np.where(scaled < 4, 1.0, 2.0))
    rounded = np.minimum(np.rint(scaled / step) * step, 6)
    return np.copysign(rounded * 2.0**exponent, blocks).reshape(w.shape)


def file_values(top: int) -> np.ndarray:
    """[bytes, 1 + apart, 32]: all codes under each byte; the first row has `top` as its largest."""
    steps = np.concatenate([[0], APART])
    byte = np.maximum(BYTES[:, None] - steps, 0)
    values = np.tile(GRID, 2) * 2.0 ** (byte[..., None] - 127.0)
    values[:, 0] = np.where(np.abs(np.tile(GRID, 2)) <= top, values[:, 0], 0)
    return values


@pytest.mark.parametrize("top", [6, 4, 3])
def test_every_code_under_every_scale_is_held_where_bytes_are_at_most_14_apart(top: int) -> None:
    """All codes of E2M1, all bytes, in one block of 128x128 with blocks up to 20 below; what is not held is as derived:
    1.5 u becomes 2 u, 0.75 u becomes u, u / 2 and less becomes 0."""
    wanted = file_values(top)
    w = wanted.astype(np.float32)
    assert (w == wanted).all()
    assert (round_mxfp4(w) == w).all(), "a file's values are not its own MXFP4 values"
    for row in range(1, 1 + len(APART)):
        pair = w[:, [0, row]]
        q = quantize(pair, SPEC)
        values = dequantize(q)
        assert (values[:, 0] == pair[:, 0]).all()
        apart = np.minimum(APART[row - 1], BYTES)
        expected = wanted[:, row].copy()
        unit = 2.0 ** (np.floor(np.log2(np.abs(pair).astype(np.float64).max((1, 2)))) - 17)
        unit = np.maximum(unit, 2.0**-136)[:, None]
        lost = {1.5: 2.0, 0.75: 1.0, 0.5: 0.0, 0.375: 0.0, 0.25: 0.0, 0.1875: 0.0, 0.125: 0.0}
        for share, becomes in lost.items():
            expected = np.where(np.abs(expected) == share * unit, np.copysign(becomes * unit, expected), expected)
        expected = np.where(np.abs(expected) < 0.125 * unit, np.copysign(0, expected), expected)
        assert (values[:, 1] == expected).all()
        assert (np.signbit(values[:, 1]) == np.signbit(expected)).all()
        exact = (values[:, 1] == pair[:, 1]).all(1)
        assert exact[apart <= 14].all()
        inexact = tensor_stats(pair, SPEC).inexact
        assert (inexact == (values != pair).sum((1, 2))).all()
        if top == 6:
            assert not exact[apart > 14].any(), "the statement of the module is too weak"
        again = quantize(values, SPEC)
        assert all((valid(q)[name].tobytes() == valid(again)[name].tobytes()) for name in valid(q))
        assert (round_mxfp4(values) == values).all(), "what is left is no value of MXFP4"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_rounding_is_that_of_the_formats(dtype: Any, rng: np.random.Generator) -> None:
    """Against float64 and log2, in both directions; the columnwise one is that of the transpose."""
    w = (rng.standard_normal((3, 64, 96)) * np.exp2(rng.integers(-9, 9, (3, 64, 96)))).astype(dtype)
    w[0, 0] = 0
    rounded = round_mxfp4(w)
    assert (rounded == by_definition(w.astype(np.float32))).all()
    assert (round_mxfp4(w.swapaxes(1, 2), "columnwise") == rounded.swapaxes(1, 2)).all()
    assert (round_mxfp4(w[1]) == rounded[1]).all()


def test_ends_of_the_range(rng: np.random.Generator) -> None:
    """fp32's largest numbers stay finite, its subnormal ones have the least scale, NaN and infinity poison 32."""
    w = np.zeros((1, 8, 32), np.float32)
    w[0, 0, :3] = np.float32(3.4e38), np.float32(2.0**127), -np.float32(1.7e38)
    w[0, 1, :3] = 2.0**-127, 3 * 2.0**-149, 2.0**-129 * 1.01
    w[0, 2, 5], w[0, 3, 5] = np.nan, -np.inf
    w[0, 4, 0] = np.float32(6 * 2.0**125) * np.float32(1.2)
    values = round_mxfp4(w)[0].astype(np.float64)
    assert values[0, :3].tolist() == [6 * 2.0**125, 4 * 2.0**125, -4 * 2.0**125]
    assert values[1, :3].tolist() == [2.0**-127, 0, 2.0**-128]
    assert np.isnan(values[2:4]).all()
    assert values[4, 0] == 6 * 2.0**125
    assert np.isnan(dequantize(quantize(w, SPEC))).all(), "a block of 128x128 hides an overflow"
    assert not values[5:].any()


def test_the_largest_value_is_kept(rng: np.random.Generator) -> None:
    """1.75 times a power of two is rounded to 2, and 448 / 1.75 is a power of two itself: a scale of the weight as it
    was would put 2 at 512, past E4M3's largest value."""
    w = rng.uniform(-1, 1, (2, 96, 64)).astype(np.float32)
    w[0, 5, 7], w[1, 70, 33] = 1.75, -1.75 * 2.0**-3
    w[1] = np.where(np.abs(w[1]) > 0.2, w[1, 70, 33], w[1])
    values, largest = dequantize(quantize(w, SPEC)), np.abs(round_mxfp4(w)).max((1, 2))
    assert largest.tolist() == [2.0, 0.25]
    assert (np.abs(values).max((1, 2)) == largest).all()
    assert (values == round_mxfp4(w)).all()


def test_a_spread_weight_rounds_once_more_and_says_how_often(rng: np.random.Generator) -> None:
    """The counter is that of values that differ from MXFP4's of the master; the bound holds and is reached."""
    w = (rng.standard_normal((2, 130, 160)) * np.exp2(-rng.integers(0, 22, (2, 130, 5)).repeat(32, 2))).astype(
        np.float32
    )
    q, rounded = quantize(w, SPEC), round_mxfp4(w)
    values = dequantize(q)
    different = values != rounded
    stats = tensor_stats(w, SPEC)
    assert stats.inexact.tolist() == different.sum((1, 2)).tolist()
    assert different.sum() > 1000
    error, bound = np.abs(values.astype(np.float64) - rounded), folding_bound(q)
    assert (error <= bound).all()
    assert (error[different] == bound[different]).any()
    assert stats.noise.tolist() == pytest.approx(((values.astype(np.float64) - w) ** 2).sum((1, 2)).tolist())
    for direction in ("rowwise", "columnwise"):
        assert (dequantize(q, direction) == values).all()  # type: ignore[arg-type]


def test_a_product_is_judged_by_mxfp4s_values(rng: np.random.Generator) -> None:
    """The bound of a GEMM is BlockScaling's; with folding_bound it holds of MXFP4's values of w, and without it not."""
    recipe, k = MXFP4Weights(), 256
    w = (rng.standard_normal((1, 96, k)) * np.exp2(-rng.integers(0, 24, (1, 96, 8)).repeat(32, 2))).astype(np.float32)
    w *= np.where(np.abs(w).max(-1, keepdims=True) < 2.0**-14, np.float32(1), np.float32(2.0**-6))
    w[0, 0, 0], w[0, 1:, :32] = 4.0, 0.0
    x = rng.standard_normal((64, k)).astype(np.float32)
    x[:, :32] = 0.0
    q, spec_x = quantize(w, SPEC), recipe.quantizer("x")
    assert spec_x is not None
    a = dequantize(quantize(x, spec_x)).astype(np.float64)
    product = (a @ dequantize(q)[0].astype(np.float64).T).astype(np.float32)
    bound = error_bound(recipe, k, out_dtype="float32")
    of_a, wanted = np.zeros_like(a), round_mxfp4(w)[0]
    assert bound.check(product, a, wanted, folding=(of_a, folding_bound(q)[0])).passed
    assert not bound.check(product, a, wanted).passed
    assert bound.check(product, a, dequantize(q)[0]).passed


def test_the_quantizer_is_blocks_of_the_rounded_values(rng: np.random.Generator) -> None:
    """Nothing else is in it: codes and scales are those of BlockScaling's quantizer of `round_mxfp4`."""
    w = rng.standard_normal((2, 160, 200)).astype(np.float32)
    for direction in ("rowwise", "columnwise"):
        spec = QuantizerSpec(**{**dict(SPEC), "mxfp4": direction})
        ours, blocks = valid(quantize(w, spec)), valid(quantize(round_mxfp4(w, direction), spec.held_by))  # type: ignore[arg-type]
        assert ours.keys() == blocks.keys()
        assert all(ours[name].tobytes() == blocks[name].tobytes() for name in ours)
    with pytest.raises(ValueError, match="direction='both' is neither"):
        round_mxfp4(w, "both")  # type: ignore[arg-type]
