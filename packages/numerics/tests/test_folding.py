"""MXFP8 with folded products: what its operands are, and how far they and their products lie from MX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo import MXFP8, BlockScaling
from octavo.quantizer import Direction
from octavo_numerics import dequantize, error_bound, folding_bound, quantize

DIRECTIONS: tuple[Direction, ...] = ("rowwise", "columnwise")
SIZES = (1, 0, 31, 130, 33, 128)
"""Around the ends of blocks of 32 and of 128."""


def exact(fmt: Any = "e4m3") -> MXFP8:
    return MXFP8(forward_format=fmt, gradient_format=fmt)


def folded(fmt: Any = "e4m3") -> MXFP8:
    return exact(fmt).replace(products="folded")


def wide(rng: np.random.Generator, *shape: int, exponents: int = 14) -> np.ndarray:
    """Normal values times powers of two, so that many lie far below the largest of their 128."""
    factors = np.exp2(-rng.integers(0, exponents, shape).astype(np.float32))
    return (rng.standard_normal(shape) * factors).astype(np.float32)


def hostile(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Any finite pattern, one in four subnormal."""
    bits = rng.integers(0, 0x7F800000, shape, dtype=np.uint32)
    bits = np.where(rng.random(shape) < 0.25, bits & np.uint32(0x7FFFFF), bits)
    return (bits | rng.integers(0, 2, shape, dtype=np.uint32) << np.uint32(31)).view(np.float32)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("values", [wide, hostile])
@pytest.mark.parametrize("columns", [32, 160, 257])
def test_folded_values_differ_from_mx_within_the_bound(
    fmt: Any, values: Any, columns: int, rng: np.random.Generator
) -> None:
    """Every operand and plane, with groups and sides that end inside blocks: equal where the bound is 0."""
    operands: dict[Any, tuple[np.ndarray, Any]] = {
        "x": (values(rng, sum(SIZES) + 3, columns), SIZES),
        "dy": (values(rng, sum(SIZES) + 3, columns), SIZES),
        "w": (values(rng, 2, 161, columns), None),
    }
    reached = 0.0
    for operand, (array, sizes) in operands.items():
        ours = quantize(array, folded(fmt).quantizer(operand), sizes)
        mx = quantize(array, exact(fmt).quantizer(operand), sizes)
        for direction in DIRECTIONS:
            a, b = (dequantize(q, direction).astype(np.float64) for q in (ours, mx))
            bound = folding_bound(ours, direction)
            assert bound.shape == a.shape
            with np.errstate(invalid="ignore"):
                error = np.where(a == b, 0.0, np.abs(a - b))
            assert (error <= bound).all(), f"{operand} {direction}: {(error - bound).max()} over"
            reached = max(reached, float(np.max(error / np.where(bound > 0, bound, 1.0))))
    assert columns == 32 or fmt == "e5m2" or reached > 0.9, "nothing was folded, so nothing was tested"


def test_a_block_that_is_not_finite_has_no_bound(rng: np.random.Generator) -> None:
    """One infinity makes 128 folded values NaN, of which MX keeps 96: that is said, not hidden."""
    x = rng.standard_normal((1, 256)).astype(np.float32)
    x[0, 5] = np.inf
    q = quantize(x, folded().quantizer("x"))
    assert np.isnan(dequantize(q)[0, :128]).all()
    assert np.isinf(folding_bound(q)[0, :128]).all()
    assert np.isfinite(folding_bound(q)[0, 128:]).all()


@pytest.mark.parametrize("recipe", [MXFP8(), BlockScaling(power_of_two=False), BlockScaling(amax_epsilon=1.0)])
def test_the_bound_is_of_folded_operands_alone(recipe: Any, rng: np.random.Generator) -> None:
    """Of other scales nothing is derived: a sentence, not a number."""
    q = quantize(rng.standard_normal((4, 128)).astype(np.float32), recipe.quantizer("x"))
    with pytest.raises(ValueError, match=r"power-of-two scales and no epsilon, as MXFP8\(products='folded'\)"):
        folding_bound(q)


def test_a_folded_product_is_judged_by_mx_values(rng: np.random.Generator) -> None:
    """The bound with its folding term holds for float64 products of wide data; without the term it does not, and a
    value that is wrong by more than that is still found."""
    recipe, k = folded(), 512
    x, w = wide(rng, 64, k, exponents=24), wide(rng, 1, 48, k, exponents=24)
    x[:, ::128], w[..., ::128] = 0.0, 0.0
    x[:, 1::128] = 2.0**12  # a loud channel, which meets quiet weights
    w[:, :, 1::128] *= np.float32(2.0**-20)
    ours, mx = ([quantize(v, r.quantizer(o)) for v, o in ((x, "x"), (w, "w"))] for r in (recipe, exact()))  # type: ignore[arg-type]
    a, b = (dequantize(q).reshape(-1, k).astype(np.float64) for q in ours)
    of_a, of_b = (folding_bound(q).reshape(-1, k) for q in ours)
    mx_a, mx_b = (dequantize(q).reshape(-1, k).astype(np.float64) for q in mx)
    bound = error_bound(recipe, k, out_dtype="float32")
    result = (a @ b.T).astype(np.float32)
    report = bound.check(result, mx_a, mx_b, folding=(of_a, of_b))
    assert report.passed, report.describe()
    assert report.t1 > 1e-3, report.describe()
    assert not bound.check(result, mx_a, mx_b).passed
    assert bound.check(result, a, b).passed
    wrong = result.copy()
    wrong[3, 5] += 1.02 * (report.allowed + np.abs(result).max())
    found = bound.check(wrong, mx_a, mx_b, folding=(of_a, of_b))
    assert found.where == (3, 5), found.describe()
    assert not found.passed
    with pytest.raises(ValueError, match=r"folding has shape \[48, 512\] for a, whose shape is \[64, 512\]"):
        bound.check(result, mx_a, mx_b, folding=(of_b, of_a))
