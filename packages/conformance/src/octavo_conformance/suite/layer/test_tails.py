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
    """NaN and Inf in the tails of x and dy change no bit of y, dx, dw or db (faults 8, 9, 10, 11, 12, 14)."""
    problem = draw_problem(rng, case.dtype, sizes=draw_sizes(rng, MAIN[3], MAIN[0] - 31))
    total = problem.total
    x, dy = problem.x.copy(), problem.dy.copy()
    for array in (x, dy):
        array[total:] = 0
    clean = run_layer(case, replace(problem, x=x, dy=dy))
    for poison in (np.nan, np.inf):
        bad_x, bad_dy = x.copy(), dy.copy()
        for array in (bad_x, bad_dy):
            array[total:] = poison
        run_layer(case, replace(problem, x=bad_x, dy=bad_dy)).assert_bits_of(clean, f"{poison} past the sum")


@needs("layer", selections.base_recipes)
def test_rows_past_the_sum_are_zero(case: Case, rng: Rng) -> None:
    """y and dx past the sum are exact zeros, a bias notwithstanding, with one row of tail and with nothing else."""
    for size in (MAIN[0] - 1, 16, 0):
        sizes = np.zeros(MAIN[3], dtype=np.int32)
        sizes[int(rng.integers(MAIN[3]))] = size
        problem = draw_problem(rng, case.dtype, sizes=sizes)
        outcome = run_layer(case, problem)
        assert_zero_rows(outcome.y, size, "y")
        assert outcome.dx is not None
        assert_zero_rows(outcome.dx, size, "dx")


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
