"""GEMMs of operands that are not finite: what they make of NaN and infinities, and what they leave alone."""

from __future__ import annotations

import numpy as np

from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_product
from octavo_conformance.problems.case import OPERANDS, Case, Measure
from octavo_conformance.problems.inputs import Array, Rng
from octavo_conformance.problems.operands import Problem, by_definition, draw_problem, gemm_call


@needs("gemm", selections.gemms)
def test_what_is_not_finite_is_not_lost(case: Case, rng: Rng, measure: Measure) -> None:
    """An overflow is never hidden: results with a NaN or an infinite operand are what float64 has of it, and others,
    of other rows and groups, are within their bound. The tail and the gradient of an empty group are zeros."""
    problem = draw_problem(rng, case.dtype, sizes=np.array([33, 70, 0, 129, 64, 17], dtype=np.int32))
    for array in (problem.x[33:103], problem.dy[103:232], problem.w[4:5]):
        _spoil(rng, array)
    _check(case, problem, measure)


@needs("gemm", selections.half_gemms, in_dtype="float16", out_dtype="float16")
def test_what_overflows_is_infinite(case: Case, rng: Rng, measure: Measure) -> None:
    """A result past the largest number of fp16 is an infinity of its sign. A scaler of losses looks for those; the
    number itself would pass for a gradient."""
    problem = draw_problem(rng, case.dtype, sizes=np.array([33, 70, 0, 129, 64, 17], dtype=np.int32))
    for array in (problem.x[33:103], problem.dy[33:103], problem.w[1]):
        array *= np.float16(1000)
    actual = _check(case, problem, measure)
    assert np.isinf(actual).any(), "no result is infinite, and many are past the largest number"


def _check(case: Case, problem: Problem, measure: Measure) -> Array:
    """The result, if it is within its bound; T2 is for numbers of one magnitude."""
    run, operands = gemm_call(case, problem)
    actual = case.numpy(run(*operands, case.sizes(problem.sizes)))
    quantizes = case.recipe.quantizes(case.gemm)
    quantized = {name: by_definition(problem, case.recipe, name) if quantizes else None for name in OPERANDS}
    assert_product(case, problem, actual, quantized, measure, cuts=())
    return actual


def _spoil(rng: Rng, array: Array) -> None:
    """Makes one element an infinity, and one a NaN."""
    places = rng.choice(array.size, 2, replace=False)
    for place, value in zip(places, (float(rng.choice([-np.inf, np.inf])), np.nan), strict=True):
        array[np.unravel_index(int(place), array.shape)] = value
