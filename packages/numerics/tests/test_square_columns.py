"""BlockScaling with square columns: what x's planes are, and how far they and dw lie from block scaling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo import BlockScaling, QuantizerSpec
from octavo_numerics import dequantize, error_bound, folding_bound, quantize

SIZES = (1, 0, 127, 130, 33, 128)
"""Around the ends of blocks of 128."""


def wide(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal values times powers of two, so that many lie far below the largest of their block."""
    factors = np.exp2(-rng.integers(0, 20, shape).astype(np.float32))
    return (rng.standard_normal(shape) * factors).astype(np.float32)


@pytest.mark.parametrize("options", [{}, {"power_of_two": False}, {"forward_format": "e5m2"}, {"amax_epsilon": 0.5}])
@pytest.mark.parametrize("columns", [1, 128, 200, 257])
def test_rows_are_those_of_blocks_and_columns_those_of_square_blocks(
    options: Any, columns: int, rng: np.random.Generator
) -> None:
    """Codes and scales, with groups and sides that end inside blocks and a tail of NaN."""
    x = wide(rng, sum(SIZES) + 3, columns)
    x[sum(SIZES) :] = np.nan
    spec = BlockScaling(square_columns=True, **options).quantizer("x")
    assert spec is not None
    ours = quantize(x, spec, SIZES)
    rows = quantize(x, BlockScaling(**options).quantizer("x"), SIZES)  # type: ignore[arg-type]
    squares = quantize(x, QuantizerSpec(**{**dict(spec), "square_columns": False, "square": True}), SIZES)
    for expected, direction in ((rows, "rowwise"), (squares, "columnwise")):
        for name in (direction, f"{direction}_scale"):
            mine, theirs = getattr(ours, name), getattr(expected, name)
            assert mine.shape == theirs.shape
        np.testing.assert_array_equal(dequantize(ours, direction), dequantize(expected, direction))  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_columns_differ_from_those_of_blocks_within_the_bound(fmt: Any, rng: np.random.Generator) -> None:
    """Equal where the bound is 0, and the bound is reached by half at least."""
    x = wide(rng, sum(SIZES), 257)
    square, block = (
        quantize(x, BlockScaling(forward_format=fmt, square_columns=on).quantizer("x"), SIZES)  # type: ignore[arg-type]
        for on in (True, False)
    )
    bound = folding_bound(square, "columnwise")
    difference = np.abs(dequantize(square, "columnwise").astype(np.float64) - dequantize(block, "columnwise"))
    assert (difference <= bound).all()
    assert difference[bound > 0].max() > 0
    assert (difference[bound > 0] / bound[bound > 0]).max() > 0.5
    assert not folding_bound(square)[dequantize(square) == dequantize(block)].min()


def test_weight_gradients_are_within_the_bound_of_those_of_blocks(rng: np.random.Generator) -> None:
    """dw of square columns, summed in fp32, against the float64 product of block scaling's columns."""
    x, dy = wide(rng, 256, 160), rng.standard_normal((256, 96)).astype(np.float32)
    recipe = BlockScaling(square_columns=True)
    square, block = (
        quantize(x, BlockScaling(square_columns=on).quantizer("x"), (256,))  # type: ignore[arg-type]
        for on in (True, False)
    )
    left = dequantize(quantize(dy, recipe.quantizer("dy"), (256,)), "columnwise").T  # type: ignore[arg-type]
    right = dequantize(block, "columnwise").T
    actual = left @ dequantize(square, "columnwise")
    folding = np.zeros_like(left, dtype=np.float64), folding_bound(square, "columnwise").T
    report = error_bound(recipe, 256, gemm="wgrad", out_dtype="float32").check(actual, left, right, folding=folding)
    assert report.passed, report.describe()
