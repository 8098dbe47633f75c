"""Rows past the sum: never read, and zero in y and dx (product, promise 2)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_zero_rows
from octavo_conformance.oracles.layers import run_layer
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import Rng, draw_sizes
from octavo_conformance.problems.operands import MAIN, draw_problem


@needs("layer", selections.base_recipes)
def test_nan_past_the_sum_changes_no_bit(case: Case, rng: Rng) -> None:
    """NaN and Inf in turns in the tails of x and dy change no bit of y, dx, dw or db (faults 8, 9, 10, 11, 12, 14)."""
    problem = draw_problem(rng, case.dtype, sizes=draw_sizes(rng, MAIN[3], MAIN[0] - 31))
    total = problem.total
    x, dy = problem.x.copy(), problem.dy.copy()
    for array in (x, dy):
        array[total:] = 0
    clean = run_layer(case, replace(problem, x=x, dy=dy))
    for array in (x, dy):
        array[total::2], array[total + 1 :: 2] = np.nan, np.inf
    run_layer(case, replace(problem, x=x, dy=dy)).assert_bits_of(clean, "NaN and Inf past the sum")


@needs("layer", selections.base_recipes)
def test_rows_past_the_sum_are_zero(case: Case, rng: Rng) -> None:
    """y and dx past the sum are exact zeros, a bias notwithstanding, where the tail is one row; longer tails, and
    nothing but tail, are in `layer::test_group_size_edges`."""
    sizes = np.zeros(MAIN[3], dtype=np.int32)
    sizes[int(rng.integers(MAIN[3]))] = MAIN[0] - 1
    outcome = run_layer(case, draw_problem(rng, case.dtype, sizes=sizes))
    assert_zero_rows(outcome.y, MAIN[0] - 1, "y")
    assert outcome.dx is not None
    assert_zero_rows(outcome.dx, MAIN[0] - 1, "dx")


@needs("layer", selections.few_recipes)
def test_two_steps_with_a_stale_tail(case: Case, rng: Rng) -> None:
    """A second step that gets the first one's results as inputs, poisoned tail included, stays finite (fault 9)."""
    problem = draw_problem(rng, case.dtype)
    poisoned = replace(problem, x=problem.x.copy(), dy=problem.dy.copy())
    poisoned.x[problem.total :] = np.nan
    poisoned.dy[problem.total :] = np.nan
    first = run_layer(case, poisoned)
    assert first.dx is not None
    assert first.dw is not None
    step = first.dw.dtype.type(0.01)
    second = run_layer(case, replace(poisoned, x=first.dx, w=(poisoned.w - step * first.dw).astype(poisoned.w.dtype)))
    for name, array in second.arrays().items():
        assert np.isfinite(array.astype(np.float32)).all(), f"{name} of the second step is not finite"
