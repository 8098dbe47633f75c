"""error_bound: honest results pass, planted faults do not."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo import MXFP8, BlockScaling, CurrentScaling, HighPrecision
from octavo.formats import DType
from octavo_numerics import ErrorBound, dequantize, error_bound, quantize
from octavo_numerics.gemm.bound_report import BoundReport

OUT: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
RECIPE = BlockScaling()


def operands(rng: np.random.Generator, r: int, c: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal((r, k)).astype(np.float32), rng.standard_normal((c, k)).astype(np.float32)


def truncated(values: np.ndarray) -> np.ndarray:
    """bfloat16 by rounding toward zero."""
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def sequential(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """fp32 sums one product at a time with an unfused multiply: the least accurate honest order."""
    total = np.zeros((len(a), len(b)), dtype=np.float32)
    for index in range(a.shape[1]):
        total += np.multiply.outer(a[:, index], b[:, index])
    return total


@pytest.mark.parametrize("out_dtype", list(OUT))
@pytest.mark.parametrize("k", [1, 2, 7, 32, 129, 2048])
@pytest.mark.parametrize("sums", [np.matmul, sequential])
def test_honest_fp32_results_pass(out_dtype: DType, k: int, sums: Any, rng: np.random.Generator) -> None:
    """BLAS and plain sums of fp32, rounded once to the output type: T1 and every T2 norm are judged and hold."""
    a, b = operands(rng, 96, 264, k)
    result = sums(a, b.T) if sums is np.matmul else sums(a, b)
    report = error_bound(RECIPE, k, out_dtype=out_dtype).check(result.astype(OUT[out_dtype]), a, b)
    assert report.passed, report.describe()
    assert set(report.t2) == {"whole", "row", "column"} | ({"tile"} if k >= 8 else set())
    assert 0 < report.t1 <= 1
    assert all(0 < ratio <= 1 for ratio in report.t2.values())


@pytest.mark.parametrize("k", [64, 1024, 4096])
def test_honest_sums_of_products_that_are_alike_pass(k: int, rng: np.random.Generator) -> None:
    """Equal products are rounded alike, and small ones beside a large one are lost alike: neither is an error of a sum
    in fp32, and a sum of 14 bits is one."""
    alike = [np.repeat(rng.uniform(0.5, 2, (8, 1)).astype(np.float32), k, axis=1) for _ in range(2)]
    small = [np.full((8, k), 2.0**-12, np.float32), np.full((8, k), 2.0**-13, np.float32)]
    for part in small:
        part[:, 0] = 1
    bound = error_bound(RECIPE, k, out_dtype="float32")
    for a, b in (alike, small):
        honest = sequential(a, b)
        report = bound.check(honest, a, b, zero_mean=False)
        assert report.passed, report.describe()
        assert not bound.check(honest * np.float32(1 - 2.0**-11), a, b, zero_mean=False).passed


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_honest_sums_of_subnormal_products_pass(out_dtype: DType, rng: np.random.Generator) -> None:
    """Each product is rounded to fp32's least number, and so each of 700 may be off by half of it; the sum may not be
    zero for that."""
    a, b = (10.0 ** rng.uniform(-23, -22, (8, 700)).astype(np.float32) for _ in range(2))
    honest = sequential(a, b)
    bound = error_bound(RECIPE, 700, out_dtype=out_dtype)
    report = bound.check(honest.astype(OUT[out_dtype]), a, b, zero_mean=False)
    assert report.passed, report.describe()
    if out_dtype == "float32":
        assert not bound.check(np.zeros_like(honest), a, b, zero_mean=False).passed


@pytest.mark.parametrize("recipe", [MXFP8(), CurrentScaling()])
def test_dequantized_operands_pass(recipe: Any, rng: np.random.Generator) -> None:
    """Real operands: quantized activations and weights, fp32 sums, bfloat16 result, in all three GEMMs' shapes."""
    x, w = rng.standard_normal((70, 96)).astype(np.float32), rng.standard_normal((1, 72, 96)).astype(np.float32)
    a, b = dequantize(quantize(x, recipe.quantizer("x"))), dequantize(quantize(w, recipe.quantizer("w")))[0]
    report = error_bound(recipe, 96).check((a @ b.T).astype(ml_dtypes.bfloat16), a, b)
    assert report.passed, report.describe()


def one_wrong_row(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    wrong = y.copy()
    row = int(rng.integers(len(y)))
    wrong[row] = y[row - 1]
    return wrong


def one_scaled_row(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    wrong = y.astype(np.float32)
    wrong[int(rng.integers(len(y)))] *= np.float32(1.02)
    return wrong.astype(y.dtype)


def all_scaled(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (y.astype(np.float32) * np.float32(1.02)).astype(y.dtype)


def stale_tile(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """An 8x8 tile from the previous step: the same problem with slightly other weights."""
    wrong = y.copy()
    row, col = (int(rng.integers(size // 8)) * 8 for size in y.shape)
    tile = y[row : row + 8, col : col + 8].astype(np.float32)
    noise = rng.standard_normal((8, 8)).astype(np.float32)
    wrong[row : row + 8, col : col + 8] = tile + np.float32(0.01) * np.abs(tile).mean() * noise
    return wrong


FAULTS = [one_wrong_row, one_scaled_row, all_scaled, stale_tile]


@pytest.mark.parametrize("accumulation", ["fp32", "hopper_bf16", "hopper_fp8_promoted"])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: Any, accumulation: Any, rng: np.random.Generator) -> None:
    """One wrong or scaled row of 4096, 2 % everywhere, a stale 8x8 tile (numerics.md): none passes."""
    a, b = operands(rng, 4096, 256, 64)
    y = (a @ b.T).astype(ml_dtypes.bfloat16)
    bound = error_bound(RECIPE, 64, accumulation=accumulation)
    assert bound.check(y, a, b).passed
    report = bound.check(fault(y, rng), a, b)
    assert not report.passed
    assert report.first_bad is not None


@pytest.mark.parametrize("accumulation", ["fp32", "hopper_fp8_promoted", "hopper_fp8"])
def test_an_output_rounded_toward_zero_is_caught(accumulation: Any, rng: np.random.Generator) -> None:
    """Also where T1 alone would let it through, under the loosest sums."""
    a, b = operands(rng, 512, 256, 64)
    recipe = BlockScaling(fast_accumulation=frozenset({"fprop"}))
    report = error_bound(recipe, 64, accumulation=accumulation).check(truncated(a @ b.T), a, b)
    assert not report.passed
    assert report.t2["whole"] > 1


def test_t2_sees_what_t1_cannot(rng: np.random.Generator) -> None:
    """A 1 % scale error in float16 under unpromoted FP8 sums stays inside T1's bound and outside T2's."""
    a, b = operands(rng, 256, 256, 512)
    recipe = CurrentScaling(fast_accumulation=frozenset({"fprop"}))
    bound = error_bound(recipe, 512, out_dtype="float16", accumulation="hopper_fp8")
    wrong = (a @ b.T * np.float32(1.01)).astype(np.float16)
    assert bound.check(wrong, a, b, zero_mean=False).passed
    report = bound.check(wrong, a, b)
    assert not report.passed
    assert report.t1 <= 1
    assert "whole" in report.describe()


def test_a_stale_tile_shows_in_its_tile_alone(rng: np.random.Generator) -> None:
    """Small enough for T1 and for every longer norm; the last tile of an uneven result is judged, too.

    Among 263 rows of 603 the largest draws show in their row, too: one of some hundreds.
    """
    a, b = operands(rng, 519, 2003, 512)
    y = (a @ b.T).astype(ml_dtypes.bfloat16)
    bound = error_bound(RECIPE, 512, accumulation="hopper_fp8_promoted")
    for row, col in ((16, 40), (511, 1995)):
        wrong = y.astype(np.float32)
        wrong[row : row + 8, col : col + 8] *= 1 + np.float32(0.005) * rng.choice([-1, 1], (8, 8)).astype(np.float32)
        report = bound.check(wrong.astype(ml_dtypes.bfloat16), a, b)
        assert report.t1 <= 1
        assert [name for name, ratio in report.t2.items() if ratio > 1] == ["tile"]
        assert report.first_bad is not None
        assert abs(report.first_bad[0] - row) < 8
        assert abs(report.first_bad[1] - col) < 8


def test_a_scaled_column_shows_in_its_column(rng: np.random.Generator) -> None:
    """Half a percent on one column, as a wrong weight scale would leave it: inside T1 under FP8 sums."""
    a, b = operands(rng, 128, 256, 512)
    y = (a @ b.T).astype(np.float32)
    y[:, 77] *= np.float32(1.005)
    report = error_bound(RECIPE, 512, accumulation="hopper_fp8_promoted").check(y.astype(ml_dtypes.bfloat16), a, b)
    assert report.t1 <= 1
    assert report.t2["column"] > 1
    assert report.t2["whole"] <= 1


def test_small_results_are_judged_by_t1_alone(rng: np.random.Generator) -> None:
    """T2's factors hold for 1024, 256 and 64 elements; one bfloat16 element may be off by more than 2 rho."""
    a, b = operands(rng, 5, 7, 16)
    report = error_bound(RECIPE, 16).check((a @ b.T).astype(ml_dtypes.bfloat16), a, b)
    assert report.passed
    assert report.t2 == {}


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_empty_problems(shape: tuple[int, int, int]) -> None:
    """Without elements anything passes; a sum of nothing must be 0 (faults.md 1 to 4)."""
    r, c, k = shape
    a, b = np.zeros((r, k)), np.zeros((c, k))
    bound = error_bound(RECIPE, k, gemm="wgrad", out_dtype="float32")
    assert bound.check(np.zeros((r, c)), a, b).passed
    if r and c:
        wrong = np.zeros((r, c))
        wrong[-1, -1] = 1e-45
        assert bound.check(wrong, a, b).first_bad == (r - 1, c - 1)


def test_nan_and_infinities_must_be_where_they_belong() -> None:
    """NaN and Inf in, the same out; NaN from finite operands is a failure that names its place."""
    a, b = np.ones((3, 4)), np.ones((2, 4))
    a[1, 2], a[2, 0] = np.nan, np.inf
    bound = error_bound(HighPrecision(), 4)
    expected = np.array([[4, 4], [np.nan, np.nan], [np.inf, np.inf]])
    assert bound.check(expected, a, b).passed
    for place, value in (((0, 1), np.nan), ((1, 0), 4.0), ((2, 1), -np.inf), ((0, 0), np.inf)):
        wrong = expected.copy()
        wrong[place] = value
        report = bound.check(wrong, a, b)
        assert report.first_bad == place
        assert f"element {place} is {value!r}" in report.describe()


def test_overflow_and_underflow_of_the_output_are_allowed() -> None:
    """float16: 70000 may be Inf of its sign, 2^-26 may be 0; the opposite infinity and 2^-20 as 0 may not."""
    bound = error_bound(HighPrecision(), 1, out_dtype="float16")

    def check(actual: float, expected: float) -> bool:
        return bound.check(np.array([[actual]]), np.array([[expected]]), np.array([[1.0]])).passed

    assert check(np.inf, 70000)
    assert check(0, 2.0**-26)
    assert not check(-np.inf, 70000)
    assert not check(np.inf, 60000)
    assert not check(0, 2.0**-20)
    wide = error_bound(HighPrecision(), 2, out_dtype="float32")
    huge = np.array([[3e38, -3e38]])
    assert wide.check(np.array([[np.nan]]), huge, np.array([[2.0, 2.0]])).passed


def test_the_description_names_the_first_bad_element(rng: np.random.Generator) -> None:
    """Coordinate, both values, the bound and every maximum, in one line."""
    a, b = operands(rng, 40, 40, 8)
    y = a @ b.T
    y[3, 5] += 1
    y[30, 1] += 50
    report = error_bound(RECIPE, 8, out_dtype="float32").check(y, a, b)
    text = report.describe()
    assert report.where == (30, 1)
    assert report.first_bad == (3, 5)
    assert f"element (3, 5) is {float(y[3, 5])!r}, expected {report.expected!r} within" in text
    assert re.search(r"error/bound maxima T1 \S+, whole \S+, tile \S+$", text)
    assert "\n" not in text


def test_the_recipe_decides_about_promotion() -> None:
    """A backend that may leave promotion out gets the wider bound only where the recipe asks for it."""
    fast = BlockScaling(fast_accumulation=frozenset({"fprop"}))
    wide = error_bound(fast, 4096, accumulation="hopper_fp8")
    assert (wide.c, wide.alpha) == (2.0**-8 * 32, 2.6e-5 * 64)
    for bound in (
        error_bound(fast, 4096, gemm="dgrad", accumulation="hopper_fp8"),
        error_bound(BlockScaling(), 4096, accumulation="hopper_fp8"),
        error_bound(fast, 4096, accumulation="hopper_fp8_promoted"),
    ):
        assert (bound.c, bound.alpha) == (2.0**-9, 1.9e-4)
        assert bound.accumulation == "hopper_fp8_promoted"


def test_the_table_of_numerics() -> None:
    """u, rho, c and alpha as docs/numerics publishes them."""
    rows: list[tuple[ErrorBound, float, float]] = [
        (error_bound(RECIPE, 4096), 2.0**-8, 1.66e-3),
        (error_bound(RECIPE, 4096, out_dtype="float16"), 2.0**-11, 2.07e-4),
        (error_bound(RECIPE, 4096, out_dtype="float32"), 2.0**-24, 0.0),
    ]
    for bound, unit, rho in rows:
        assert (bound.unit, bound.rho, bound.c) == (unit, rho, 256 * 2.0**-24)
    bf16 = error_bound(RECIPE, 4096, accumulation="hopper_bf16")
    assert bf16.c == 257 * 2.0**-23
    assert bf16.alpha == pytest.approx(1.2e-9 * 4096, rel=0.02)
    assert bf16.norm_limit("row") == pytest.approx(1.4 * 1.66e-3, rel=1e-3)


def hopper(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a b^T of FP8 values as Hopper sums up to 128 products: of each 32, all and the running sum are cut toward zero
    at 2^-13 of the largest one's power of two.
    """
    total = np.zeros((len(a), len(b)), dtype=np.float32)
    for start in range(0, a.shape[1], 32):
        terms = np.multiply(a[:, None, start : start + 32], b[None, :, start : start + 32], dtype=np.float32)
        terms = np.concatenate([terms, total[..., None]], axis=2)
        quantum = np.ldexp(np.float32(1), np.frexp(np.abs(terms).max(axis=2))[1] - 14)
        total = np.trunc(terms / quantum[..., None]).sum(axis=2) * quantum
    return total


def test_products_of_one_sign_are_honest_in_an_fp8_sum(rng: np.random.Generator) -> None:
    """Cuts toward zero do not cancel there. One such element in 64 took a tile on a GPU past its norm (decision 78)."""
    bound = error_bound(BlockScaling(), 122, gemm="wgrad", out_dtype="float32", accumulation="hopper_fp8")
    tile, norms = (slice(16, 24), slice(16, 24)), []
    for _ in range(16):
        a, b = (
            part.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            for part in 64 * np.stack(operands(rng, 56, 56, 122))
        )
        b[20] = np.copysign(b[20], a[17])
        y, exact = hopper(a, b), a.astype(np.float64) @ b.T.astype(np.float64)
        report = bound.check(y, a, b)
        assert report.passed, report.describe()
        norms.append(np.linalg.norm((y - exact)[tile]) / np.linalg.norm(exact[tile]))
    assert max(norms) > bound.norm_limit("tile"), "no tile was past its norm, so nothing was tried"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: error_bound(RECIPE, -1), "k=-1; a sum has zero products or more"),
        (lambda: error_bound(RECIPE, 1, gemm="bprop"), "gemm is 'bprop'; give 'fprop', 'dgrad' or 'wgrad'"),  # type: ignore[arg-type]
        (lambda: error_bound(RECIPE, 1, out_dtype="float64"), "out_dtype is 'float64'; give 'bfloat16', "),  # type: ignore[arg-type]
        (lambda: error_bound(RECIPE, 1, accumulation="bf16"), "accumulation is 'bf16'; give one of fp32, "),  # type: ignore[arg-type]
        (
            lambda: error_bound(HighPrecision(), 1, accumulation="hopper_fp8"),
            "accumulation='hopper_fp8' sums FP8 products and fprop of recipe 'high_precision' is in high precision",
        ),
        (lambda: error_bound(RECIPE, 3).check(*np.ones((3, 2, 2))), "the bound is for k=3, their last axis"),
        (lambda: error_bound(RECIPE, 2).check(*np.ones((3, 1, 2, 2))), "actual has shape [1, 2, 2]; give the matrix"),
        (
            lambda: error_bound(RECIPE, 2).check(np.ones((2, 3)), np.ones((2, 2)), np.ones((2, 2))),
            "actual has shape [2, 3]; give [2, 2]",
        ),
    ],
)
def test_bad_arguments_are_named(call: Any, message: str) -> None:
    """One line with the argument, its value and the fix."""
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_report_is_a_value() -> None:
    """Passing reports say so, with the maxima that are to be published."""
    report = error_bound(RECIPE, 1).check(np.ones((32, 32)), np.ones((32, 1)), np.ones((32, 1)))
    assert isinstance(report, BoundReport)
    assert report.describe() == ("within the fp32 bound for k=1, bfloat16 out: error/bound maxima T1 0, whole 0")
