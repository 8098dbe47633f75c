"""Relations between two runs of the layer that hold to the bit, whatever the order of summation.

Weights that pick one column each, times a power of two per group, leave one product in every sum: y shows x's codes and
dx shows dy's, so that what must not matter can be seen not to.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.oracles.layers import run_layer
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import DTYPES, Array, Rng, offsets
from octavo_conformance.problems.operands import MAIN, Problem, draw_problem

SIZES = np.array([33, 0, 128, 1, 17, 129], dtype=np.int32)


def picking_weights(dtype: str, factors: Array) -> Array:
    """[G, N, K]: row n of group g holds factors[g] in column n."""
    _, K, N, G = MAIN
    w = np.zeros((G, N, K), dtype=np.float32)
    w[:, np.arange(N), np.arange(N)] = factors[:, None]
    return w.astype(DTYPES[dtype])  # type: ignore[index]


def _problem(case: Case, rng: Rng, sizes: Array) -> Problem:
    problem = draw_problem(rng, case.dtype, sizes=sizes)
    factors = np.exp2(np.arange(MAIN[3]) % 4 - 2.0)
    return replace(problem, w=picking_weights(case.dtype, factors))


def _rows(array: Array, sizes: Array, group: int) -> Array:
    starts = offsets(sizes)
    return array[int(starts[group]) : int(starts[group + 1])]


@needs("layer", selections.unrounded_recipes)
def test_expert_permutation(case: Case, rng: Rng) -> None:
    """Experts in another order, empty ones moved about with them: the same rows come back, moved (fault 6)."""
    sizes = np.array([33, 0, 129, 0, 17, 0], dtype=np.int32)
    problem = _problem(case, rng, sizes)
    order = rng.permutation(MAIN[3])
    x, dy = problem.x.copy(), problem.dy.copy()
    total = problem.total
    for moved, array in ((x, problem.x), (dy, problem.dy)):
        moved[:total] = np.concatenate([_rows(array, sizes, int(group)) for group in order])
    scales = {name: scale[order] for name, scale in problem.scales.items()}
    permuted = Problem(x, problem.w[order], dy, sizes[order], problem.bias[order], scales)
    plain, moved_outcome = run_layer(case, problem), run_layer(case, permuted)
    for name in ("y", "dx"):
        before, after = plain.arrays()[name], moved_outcome.arrays()[name]
        for place, group in enumerate(order):
            assert_same_bits(
                _rows(after, sizes[order], place), _rows(before, sizes, int(group)), f"{name} of expert {group}, moved"
            )


@needs("layer", selections.row_recipe)
def test_empty_experts_elsewhere(case: Case, rng: Rng) -> None:
    """Three busy experts, with the empty ones after them or between them: no scale, offset or weight shifts. In other
    recipes drawn orders of `test_expert_permutation` move as many."""
    packed = np.array([33, 128, 17, 0, 0, 0], dtype=np.int32)
    spread = np.array([0, 33, 0, 128, 0, 17], dtype=np.int32)
    order = np.array([3, 0, 4, 1, 5, 2])
    problem = _problem(case, rng, packed)
    scales = {name: scale[order] for name, scale in problem.scales.items()}
    apart = Problem(problem.x, problem.w[order], problem.dy, spread, problem.bias[order], scales)
    before, after = run_layer(case, problem), run_layer(case, apart)
    for name in ("y", "dx"):
        assert_same_bits(after.arrays()[name], before.arrays()[name], f"{name} with empty experts between")


@needs("layer", selections.row_scaled_recipes)
def test_split_invariance(case: Case, rng: Rng) -> None:
    """Where no scale spans rows, an expert's rows may be split between two copies of it."""
    whole = np.array([129, 0, 0, 0, 0, 0], dtype=np.int32)
    halves = np.array([33, 0, 95, 0, 1, 0], dtype=np.int32)
    problem = _problem(case, rng, whole)
    same = replace(
        problem,
        w=np.repeat(problem.w[:1], MAIN[3], axis=0),
        bias=np.repeat(problem.bias[:1], MAIN[3], axis=0),
    )
    before = run_layer(case, same)
    after = run_layer(case, replace(same, sizes=halves))
    for name in ("y", "dx"):
        assert_same_bits(after.arrays()[name], before.arrays()[name], f"{name} of a split expert")


@needs("layer", selections.unrounded_recipes)
def test_padding_invariance(case: Case, rng: Rng) -> None:
    """Zero rows at an expert's end change neither the real rows of y and dx nor, but for the order of sums, dw
    (fault 64)."""
    problem = _problem(case, rng, np.array([33, 0, 128, 1, 17, 0], dtype=np.int32))
    padded_sizes = np.where(problem.sizes > 0, problem.sizes + 15, 0).astype(np.int32)
    x, dy = np.zeros_like(problem.x), np.zeros_like(problem.dy)
    old, new = offsets(problem.sizes), offsets(padded_sizes)
    for group, size in enumerate(problem.sizes):
        for padded, array in ((x, problem.x), (dy, problem.dy)):
            padded[int(new[group]) : int(new[group]) + size] = array[int(old[group]) : int(old[group]) + size]
    before = run_layer(case, problem)
    after = run_layer(case, replace(problem, x=x, dy=dy, sizes=padded_sizes))
    for name in ("y", "dx"):
        plain, padded = before.arrays()[name], after.arrays()[name]
        for group, size in enumerate(problem.sizes):
            mine = padded[int(new[group]) : int(new[group]) + size]
            assert_same_bits(mine, _rows(plain, problem.sizes, group), f"{name} of padded expert {group}")


@needs("layer", selections.base_recipes)
def test_one_expert_does_not_see_another(case: Case, rng: Rng) -> None:
    """NaN in one expert's rows and weights leaves the others' y, dx and dw bits alone."""
    problem = draw_problem(rng, case.dtype, sizes=SIZES)
    starts = offsets(SIZES)
    bad = replace(problem, x=problem.x.copy(), w=problem.w.copy(), dy=problem.dy.copy())
    rows = slice(int(starts[2]), int(starts[3]))
    bad.x[rows], bad.dy[rows], bad.w[2] = np.nan, np.nan, np.nan
    clean, poisoned = run_layer(case, problem), run_layer(case, bad)
    assert clean.dw is not None
    assert poisoned.dw is not None
    for group in (0, 3, 4, 5):
        for name in ("y", "dx"):
            mine, theirs = (_rows(each.arrays()[name], SIZES, group) for each in (poisoned, clean))
            assert_same_bits(mine, theirs, f"{name} of expert {group} next to a NaN expert")
        assert_same_bits(poisoned.dw[group], clean.dw[group], f"dw of expert {group} next to a NaN expert")
    assert np.isnan(poisoned.y[rows].astype(np.float32)).all(), "NaN weights and rows gave numbers"
