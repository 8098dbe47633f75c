"""What our own code costs on every call: a report, not a gate."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.problems.case import Case, Measure
from octavo_conformance.problems.inputs import Rng
from octavo_conformance.problems.operands import draw_problem, gemm_call
from octavo_registry import state_token

REPEATS, LOOPS = 5, 2_000


def _best(function: Callable[[], object], loops: int) -> float:
    """Seconds of one call: the best of several means."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(loops):
            function()
        best = min(best, (time.perf_counter() - start) / loops)
    return best


@needs("gemm", selections.one_fprop)
def test_no_object_is_kept(case: Case, rng: Rng) -> None:
    """Python objects do not pile up with calls: less than one per call stays (faults 52, 53)."""
    problem = draw_problem(rng, case.dtype)
    run, operands = gemm_call(case, problem)
    sizes = case.sizes(problem.sizes)

    def count(calls: int) -> int:
        for _ in range(calls):
            run(*operands, sizes)
        gc.collect()
        return len(gc.get_objects())

    before = count(5)
    growth = count(20) - before
    assert growth < 20, f"20 calls leave {growth} Python objects behind"


@needs("gemm", selections.one_fprop)
def test_dispatch_cost_is_reported(case: Case, rng: Rng, measure: Measure) -> None:
    """Nanoseconds of the guard that a layer holding its plan pays, and microseconds of one small fprop with it."""
    problem = draw_problem(rng, case.dtype)
    run, operands = gemm_call(case, problem)
    sizes = case.sizes(problem.sizes)
    token = state_token()

    def guarded() -> object:
        return run if token is state_token() else None

    assert guarded() is run, "the state token went stale with nothing changed"
    empty = _best(lambda: None, LOOPS)
    measure("measured.dispatch_ns", (_best(guarded, LOOPS) - empty) * 1e9)
    measure("measured.small_fprop_us", _best(lambda: run(*operands, sizes), 3) * 1e6)
