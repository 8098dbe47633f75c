"""The front end's layer on this backend alone, forward and backward, against the definition composed in numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.layers import assert_layer, run_layer
from octavo_conformance.problems.case import Case, Examples, Measure
from octavo_conformance.problems.inputs import INTERESTING_SIZES, Rng
from octavo_conformance.problems.operands import MAIN, draw_problem

EDGES = (
    ("first, middle and last empty", [0, 129, 0, 0, 33, 0]),
    ("all but one empty", [0, 0, 0, 129, 0, 0]),
    ("all empty", [0, 0, 0, 0, 0, 0]),
    ("all full", [128, 128, 64, 32, 32, 16]),
    ("one row each", [1, 1, 1, 1, 1, 1]),
)


@needs("layer", selections.recipes)
def test_forward_and_gradients(case: Case, rng: Rng, full: bool, measure: Measure) -> None:
    """y, dx, dw and db are those of the definition's codes, within the GEMM bounds, on drawn sizes with empty groups
    and a tail (faults 4, 10, 38, 57, 63, 65)."""
    for _ in range(4 if full else 1):
        problem = draw_problem(rng, case.dtype)
        assert_layer(case, problem, run_layer(case, problem), measure)


@needs("layer", selections.base_recipes)
def test_group_size_edges(case: Case, rng: Rng, measure: Measure) -> None:
    """Empty groups first, last, in the middle, everywhere; no tail; one row each (faults 2, 4, 5, 6, 7)."""
    for name, sizes in EDGES:
        problem = draw_problem(rng, case.dtype, sizes=np.array(sizes, dtype=np.int32))
        outcome = run_layer(case, problem)
        for result, array in outcome.arrays().items():
            assert np.isfinite(array.astype(np.float32)).all(), f"{name}: {result} is not finite"
        assert_layer(case, problem, outcome, measure)


@needs("layer", selections.few_recipes)
def test_any_group_sizes(case: Case, rng: Rng, measure: Measure, examples: Examples) -> None:
    """Sizes on both sides of every tile edge (faults 15, 16, 17, 19); `gemm` and `test_group_size_edges` have drawn
    sizes and the edges in every recipe."""
    problem = draw_problem(rng, case.dtype)

    @given(st.lists(st.sampled_from(INTERESTING_SIZES), min_size=MAIN[3], max_size=MAIN[3]))
    def check(drawn: list[int]) -> None:
        sizes = np.array(drawn, dtype=np.int32)
        while sizes.sum() > MAIN[0]:
            sizes[int(np.argmax(sizes))] = 0
        changed = replace(problem, sizes=sizes)
        assert_layer(case, changed, run_layer(case, changed), measure)

    examples(check)


@needs("layer", selections.mx_recipe)
def test_shapes_between_tiles(case: Case, rng: Rng, full: bool, measure: Measure) -> None:
    """K and N that are multiples of 16 and of no tile, as kernels that refuse odd columns serve; few rows, one group
    (faults 13, 17, 19, 20, 24, 25)."""
    shapes = [(33, 80, 144, 1)]
    if full:
        shapes += [(M, 96, 80, 3) for M in (1, 2, 7, 31, 63, 64, 65, 130)]
        shapes += [(65, K, 48, 2) for K in (16, 528, 544, 768)]
    for shape in shapes:
        problem = draw_problem(rng, case.dtype, shape)
        assert_layer(case, problem, run_layer(case, problem), measure)


@needs("layer", selections.mx_recipe)
def test_odd_shapes(case: Case, rng: Rng, full: bool, measure: Measure) -> None:
    """K and N that are not a multiple of any block (faults 24, 25)."""
    shapes = [(33, 45, 77, 1)]
    if full:
        shapes += [(65, K, 48, 2) for K in (1, 15, 17, 127)]
    for shape in shapes:
        problem = draw_problem(rng, case.dtype, shape)
        assert_layer(case, problem, run_layer(case, problem), measure)


@needs("layer", selections.row_recipe)
def test_many_groups(case: Case, rng: Rng, full: bool, measure: Measure) -> None:
    """More than 64 groups, more groups than rows; more than 1 000 in the full selection (product: int64 inside)."""
    groups = 1100 if full else 70
    sizes = np.where(rng.random(groups) < 0.6, 0, rng.integers(0, 5, groups)).astype(np.int32)
    problem = draw_problem(rng, case.dtype, (int(sizes.sum()) + 5, 48, 32, groups), sizes)
    assert_layer(case, problem, run_layer(case, problem), measure)


@needs("layer", selections.few_recipes)
def test_positive_mean_and_outliers(case: Case, rng: Rng, measure: Measure) -> None:
    """Activations with a mean and with outliers: sums grow, and the accumulator must keep up (docs/numerics)."""
    for name in ("positive", "outliers"):
        problem = draw_problem(rng, case.dtype, name=name)
        assert_layer(case, problem, run_layer(case, problem), measure, cuts=())


@needs("layer", selections.mx_recipe)
def test_without_bias_and_forward_only(case: Case, rng: Rng, measure: Measure) -> None:
    """No bias, no gradient asked for: y alone, and the same y."""
    problem = draw_problem(rng, case.dtype)
    outcome = run_layer(case, problem, bias=False, backward=False)
    assert set(outcome.arrays()) == {"y"}, f"no gradient is asked for, and there are {sorted(outcome.arrays())}"
    assert_layer(case, problem, outcome, measure, bias=False)


@needs("layer", selections.mx_recipe, sizes="host")
def test_sizes_may_be_a_list(case: Case, rng: Rng) -> None:
    """Host sizes give the result that a framework array of them gives."""
    problem = draw_problem(rng, case.dtype)
    as_list = [int(size) for size in problem.sizes]
    run_layer(case, problem, sizes=as_list).assert_bits_of(run_layer(case, problem), "sizes as a list")


@needs("layer", selections.base_recipes)
def test_repeats_bitwise(case: Case, rng: Rng, full: bool) -> None:
    """The same call gives the same bits, db included (faults 22, 41, 65)."""
    problem = draw_problem(rng, case.dtype)
    first = run_layer(case, problem)
    for _ in range(20 if full else 1):
        run_layer(case, problem).assert_bits_of(first, "repeated")


@needs("layer", selections.stochastic_recipes)
def test_seed_reaches_the_gradients(case: Case, rng: Rng, measure: Measure) -> None:
    """Another seed or group_offset changes the stochastic operands alone, to the definition's (fault 40)."""
    problem = draw_problem(rng, case.dtype)
    first = run_layer(case, problem)
    for arguments in ({"seed": int(rng.integers(2**63))}, {"group_offset": 7}):
        other = run_layer(case, problem, **arguments)  # type: ignore[arg-type]
        assert_layer(case, problem, other, measure, **arguments)  # type: ignore[arg-type]
        assert other.dx is not None
        assert first.dx is not None
        assert other.dx.tobytes() != first.dx.tobytes(), f"{arguments} changes nothing"
