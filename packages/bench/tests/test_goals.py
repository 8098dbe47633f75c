"""Goals of GEMMs and steps, from rates made by hand: which apply, what they need, whether they are met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from octavo.recipe_base import Gemm
from octavo_bench.harness.goals import Goal, Neighbours, accumulate_limit_us, gemm_goals, tightest, verdict
from octavo_bench.harness.recipes import ACCUMULATED, FAST, KINDS, GemmCase, chosen_cases
from octavo_bench.harness.recorded import DEEPGEMM_TFLOPS, STEP_GOALS, STEP_MS
from octavo_bench.harness.shapes import DEEPGEMM, MODELS, SMALL, Shape
from octavo_bench.harness.timing import Call, Times
from octavo_bench.harness.turns import over
from octavo_bench.step.goals import StepNeighbours, absolute_goal, quantize_ms, step_goals
from octavo_bench.step.row import PEER, StepRow

DSV3, MANY, EIGHT = MODELS[1], MODELS[5], DEEPGEMM[0]
PEERS = {
    "grouped_mm": 600.0,
    "dense bf16": 700.0,
    "dense fp8 fast": 1300.0,
    "dense fp8 exact": 1200.0,
    "scaled_grouped_mm fast": 1250.0,
    "scaled_grouped_mm exact": 1000.0,
}


def _goals(kind: str, gemm: Gemm, tflops: float, shape: Shape = DSV3, sizes: str = "even", **near: object) -> list[str]:
    fast, accumulate = bool(near.pop("fast", False)), bool(near.pop("accumulate", False))
    case = GemmCase(kind, gemm, fast, accumulate)
    found = gemm_goals(case, shape, sizes, tflops, Neighbours(peers=PEERS, **near))  # type: ignore[arg-type]
    return [f"{goal.name}: {'pass' if goal.passed else 'MISS'}" for goal in found]


def test_shapes_are_those_of_the_recorded_figures() -> None:
    """Each recorded table has a row a shape."""
    assert set(STEP_MS) == set(STEP_GOALS) == {shape.key for shape in MODELS}
    assert set(DEEPGEMM_TFLOPS) == {shape.key for shape in DEEPGEMM}
    figures = DEEPGEMM_TFLOPS[EIGHT.key]
    assert EIGHT.flops / figures.fprop_block / 1e6 == pytest.approx(361, abs=1)  # the microseconds recorded beside it
    assert EIGHT.flops / figures.wgrad_fp8_accumulate / 1e6 == pytest.approx(824, abs=2)


@pytest.mark.parametrize("kind", ["delayed", "current", "row"])
def test_fp8_with_one_scale_a_sum_is_held_to_dense_fp8(kind: str) -> None:
    """Exact against exact, fast against fast; never below the framework's own."""
    assert _goals(kind, "fprop", 1165) == ["0.97 of dense exact: pass", "scaled_grouped_mm: pass"]
    assert _goals(kind, "dgrad", 1163) == ["0.97 of dense exact: MISS", "scaled_grouped_mm: pass"]
    assert _goals(kind, "fprop", 1245, fast=True) == ["0.97 of dense fast: MISS", "scaled_grouped_mm: MISS"]
    assert _goals(kind, "fprop", 1117, sizes="skewed") == ["0.93 of dense exact: pass", "scaled_grouped_mm: pass"]


def test_many_experts_with_few_rows_have_a_rate_of_their_own() -> None:
    """128 experts of 512 rows, where weights dominate: an H200's figure, judged on one alone."""
    assert _goals("row", "fprop", 1099, MANY, h200=True) == ["1100 TFLOP/s: MISS", "scaled_grouped_mm: pass"]
    assert _goals("row", "fprop", 1101, MANY, h200=True)[0] == "1100 TFLOP/s: pass"
    assert _goals("row", "fprop", 1101, MANY) == ["scaled_grouped_mm: pass"]


def test_block_scaling_is_held_to_deepgemm_or_dense() -> None:
    """The lower of DeepGEMM's recorded figure (1332) and 1.02 of dense exact (1224)."""
    assert _goals("block", "fprop", 1225, EIGHT, h200=True) == ["1.02 of dense exact: pass"]
    assert _goals("block", "dgrad", 1223, EIGHT) == ["1.02 of dense exact: MISS"]
    assert _goals("block", "fprop", 1225) == []  # no figure for this shape


def test_bf16_is_held_to_the_frameworks_own() -> None:
    """1.05 and 1.08 of grouped_mm, 0.98 of dense, skewed within 6 % of even."""
    assert _goals("bf16", "fprop", 690) == ["1.05 of grouped_mm: pass", "0.98 of dense: pass"]
    assert _goals("bf16", "wgrad", 647) == ["1.08 of grouped_mm: MISS"]
    assert _goals("bf16", "wgrad", 649, sizes="skewed", even=700.0) == [
        "1.08 of grouped_mm: pass",
        "0.94 of even: MISS",
    ]


def test_fp8_wgrad_is_held_to_its_limit() -> None:
    """DSv3 fc1, 8 experts: 1.97 GB at 4.27 TB/s are 462 us, above the products' 401 us; 570 us are allowed."""
    limit = accumulate_limit_us(EIGHT, 4.27, 1200.0)
    assert limit == pytest.approx(461.7, abs=0.5)
    assert accumulate_limit_us(EIGHT, None, 1200.0) is None
    at = {"copy_tb_per_s": 4.27, "h200": True, "accumulate": True}
    met, missed = EIGHT.tflops(565), EIGHT.tflops(580)
    assert _goals("block", "wgrad", met, EIGHT, **at) == [
        "0.8 of memory's or tensor cores' limit: pass",
        "570 us: pass",
    ]
    assert _goals("block", "wgrad", missed, EIGHT, **at) == [
        "0.8 of memory's or tensor cores' limit: MISS",
        "570 us: MISS",
    ]
    assert _goals("row", "wgrad", 900, accumulating=850.0) == ["faster than accumulating: pass"]


def test_the_tightest_goal_is_shown() -> None:
    """By margin, which is above 1 where a goal is met, whichever way it counts."""
    met, missed = Goal("rate", 100.0, 110.0), Goal("us", 570.0, 600.0, most=True)
    assert (met.margin, missed.margin) == (1.1, 0.95)
    assert tightest([met, missed]) is missed
    assert verdict([met, missed]) == "0.950 MISS (us)"
    assert verdict([]) == "-"
    assert missed.as_dict() == {"name": "us", "needed": 570.0, "reached": 600.0, "margin": 0.95, "passed": False}


def test_cases_are_every_kind_with_its_variants() -> None:
    """Fast accumulation where a sum has one scale; accumulating wgrads once a kind."""
    cases = chosen_cases(KINDS, ("fprop", "dgrad", "wgrad"), fast=True, accumulate=True)
    assert len(cases) == len(set(cases)) == 3 * (len(KINDS) + len(FAST)) + len(ACCUMULATED)
    assert {case.kind for case in cases if case.fast} == FAST
    assert all(case.recipe.fast_accumulation for case in cases if case.fast)  # type: ignore[attr-defined]
    assert chosen_cases(("bf16",), ("fprop",), fast=True, accumulate=True) == [GemmCase("bf16", "fprop")]


def _step(kind: str, ms: float, sizes: str = "even", *, over_torch: float | None = None) -> StepRow:
    framework, served = "torch" if over_torch is None else "jax", () if kind == PEER else ("some-native",)
    times = Times(1e3 * ms, 1e3 * ms, 1e3 * ms)
    return StepRow(framework, DSV3, sizes, kind, False, served, times, over_torch=over_torch)


def test_absolute_step_goals() -> None:
    """6.1 ms for DSv3 fc1, 8 % more for current, 3 % more in JAX, 0.88 ms less with weights reused."""
    assert absolute_goal(DSV3, "block", False, "torch") == 6.1
    assert absolute_goal(DSV3, "current", False, "torch") == pytest.approx(6.588, rel=1e-12)
    assert absolute_goal(DSV3, "delayed", True, "torch") == pytest.approx(5.22, rel=1e-12)
    assert absolute_goal(DSV3, "block", False, "jax") == pytest.approx(6.283, rel=1e-12)
    assert absolute_goal(DSV3, "mxfp8", False, "torch") is None
    assert absolute_goal(SMALL[0], "block", False, "torch") is None


def test_step_goals_of_a_run() -> None:
    """Skewed against even, emulated kinds against bf16 and their bytes; none for the framework's own."""
    rows = (
        _step(PEER, 8.9),
        _step("bf16", 8.0),
        _step("block", 6.0),
        _step("block", 6.4, "skewed"),
        _step("mxfp8", 9.0),
    )
    near = StepNeighbours(rows, 4.27, True)
    told = [[f"{goal.name}: {'pass' if goal.passed else 'MISS'}" for goal in step_goals(row, near)] for row in rows]
    assert told == [[], [], ["6.10 ms: pass"], ["1.06 of even: MISS"], ["1.1 of bf16 + bytes: pass"]]
    jax = tuple(_step("block", ms, over_torch=ms / 6.0) for ms in (6.17, 6.19))
    found = [[goal.passed for goal in step_goals(row, StepNeighbours((*rows, row), 4.27, True))] for row in jax]
    assert found == [[True, True], [True, False]]  # 6.283 ms; 1.03 of torch's 6.0
    # x, w and dy at 4.06 bytes an element: 0.22, 0.88 and 0.13 ms of the recorded floor
    assert quantize_ms(DSV3, "mxfp8", 4.27) == pytest.approx(1.24, abs=0.02)


class _Clock:
    """An engine whose device takes longer from batch to batch, as one that gets warm."""

    device = "cuda"
    elapsed = 1.0

    def __init__(self, cost: float) -> None:
        self.cost = cost

    def batch(self, calls: Sequence[Call], count: int) -> float:
        for index in range(count):
            calls[index % len(calls)]()
        _Clock.elapsed += 0.01
        return 1e3 * self.cost * _Clock.elapsed


def test_frameworks_are_compared_in_turns() -> None:
    """A device that slows down by a tenth during the run changes a ratio by what it slows down in one turn."""
    made: list[str] = []
    first, second = _Clock(2.0), _Clock(2.1)
    found = over((cast(Any, first), [lambda: made.append("a")]), (cast(Any, second), [lambda: made.append("b")]))
    assert found == pytest.approx(1.05, rel=0.01)
    assert made.count("a") == made.count("b")
    assert "ab" in "".join(made)
    assert "ba" in "".join(made)
