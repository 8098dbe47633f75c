"""The table's rows, their goals, and the ragged sizes."""

from __future__ import annotations

import pytest

from octavo_bench.errors import InputError
from octavo_bench.harness.goals import Goals, Place
from octavo_bench.harness.shapes import even, ragged
from octavo_bench.harness.timing import MOST_COPIES, host_times, input_copies, summary
from octavo_bench.quantize.benchmark import parse_shapes
from octavo_bench.quantize.case import CASES, Case, chosen_cases


def test_goals_are_those_of_the_design(h200: Goals) -> None:
    """Row 0.95 and both 0.90; two passes 0.90; NVFP4 0.80, stochastic 0.60 and 0.40; SwiGLU 0.90."""

    def needed(label: str) -> float | None:
        goals = h200.judge("quantize", {"case": label}, {"the copy rate": 1.0}, Place("cuda", "some GPU"))
        return goals[0].needed if goals else None

    for recipe in ("delayed", "block", "mxfp8"):
        assert (needed(f"{recipe} row"), needed(f"{recipe} row+col")) == (0.95, 0.90)
    assert (needed("current row"), needed("current row+col")) == (0.90, 0.90)
    assert (needed("nvfp4 row"), needed("nvfp4 row+col")) == (0.80, None)
    assert (needed("nvfp4 stochastic row"), needed("nvfp4 stochastic row+col")) == (0.60, 0.40)
    for recipe in ("block", "mxfp8"):
        assert (needed(f"swiglu + {recipe} row"), needed(f"swiglu + {recipe} row+col")) == (0.90, 0.90)


def test_every_goal_of_a_case_names_a_case(h200: Goals) -> None:
    """A rule for a label that no row has would never be judged."""
    labels = {case.label for case in CASES}
    for rule in h200.goals["quantize"]:
        allowed = rule.where["case"]
        assert isinstance(allowed, list)
        assert set(allowed) <= labels


def test_labels_name_one_row_each() -> None:
    """Results of two runs are joined by them."""
    labels = [case.label for case in CASES]
    assert len(set(labels)) == len(labels)
    assert {"plan", "block weights row+col", "mxfp8 panels to bf16", "block row+col, plain layout"} <= set(labels)


def test_the_specs_are_those_of_the_recipes() -> None:
    """What is timed is what a layer runs."""
    from octavo import NVFP4, BlockScaling

    gradient = next(case for case in CASES if case.label == "nvfp4 stochastic hadamard row+col")
    assert gradient.spec == NVFP4().quantizer("dy")
    weights = next(case for case in CASES if case.kind == "weights")
    assert weights.spec == BlockScaling().quantizer("w")


def test_recipes_choose_cases_and_the_plan_stays() -> None:
    """Each recipe brings its variants."""
    assert chosen_cases("") == CASES
    assert {case.recipe for case in chosen_cases("mxfp8, nvfp4")} == {None, "mxfp8", "nvfp4"}
    assert chosen_cases("delayed")[0].label == "plan"


def test_ragged_sizes_fill_the_rows_and_one_group_is_empty(seed: int) -> None:
    """Skewed, reproducible from the seed, and nothing is left over as a tail."""
    sizes = ragged(32768, 128, seed).sizes
    assert len(sizes) == 128
    assert sum(sizes) == 32768
    assert min(sizes) == 0
    assert sizes[64] == 0
    assert max(sizes) > 2 * 32768 // 128
    assert ragged(32768, 128, seed).sizes == sizes
    assert ragged(32768, 128, seed + 1).sizes != sizes


def test_even_sizes_differ_by_one_row_at_most() -> None:
    """Where the groups do not divide the rows."""
    assert even(32768, 8).sizes == (4096,) * 8
    assert even(10, 4).sizes == (3, 3, 2, 2)
    assert even(10, 4).label == "4 even"


@pytest.mark.parametrize("text", ["", "12", "12x", "x12", "32x15", "0x32", "-1x32", "32x32,", "32x32,32x32", "1.5x16"])
def test_shapes_that_do_not_fit_are_named(text: str) -> None:
    """One part that is wrong is quoted."""
    with pytest.raises(InputError, match="--shape"):
        parse_shapes(text)


def test_times_are_summed_up_by_the_median() -> None:
    """One slow call moves the ninetieth percentile and not the result."""
    times = summary([3.0, 1.0, 2.0, 100.0, 2.0])
    assert (times.low, times.median, times.high) == (1.0, 2.0, 100.0)
    assert host_times(lambda: sum(range(1000)), 5).median > 0


def test_inputs_rotate_until_three_caches_are_passed() -> None:
    """A large input is cold by itself; a tiny one has a limit."""
    assert input_copies(470_000_000, 60_000_000) == 1
    assert input_copies(16_000_000, 60_000_000) == 12
    assert input_copies(1_000, 60_000_000) == MOST_COPIES


def test_passes_follow_the_scale() -> None:
    """A scale that covers more than a tile needs its amax first."""
    two = {case.label for case in CASES if case.passes == 2}
    assert {"current row", "per-row row+col", "nvfp4 row"} <= two
    assert not {"per-row row", "block row+col", "nvfp4 panels to bf16", "delayed row"} & two
    assert Case("plan").passes == 1
