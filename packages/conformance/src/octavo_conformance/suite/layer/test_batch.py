"""A row of y has the same bits in every batch, where recipe and card promise it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.formats import DType
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.oracles.layers import run_layer
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import Array, Rng, draw, draw_sizes, offsets
from octavo_conformance.problems.operands import MAIN, Problem, draw_problem

ROWS = (MAIN[0], 33)
MORE_ROWS = (*ROWS, 1, 64, 127, 700, 1500, 2600)
"""Of the batches that rows are moved to: kernels choose their tiles by them."""


def other_batch(problem: Problem, rng: Rng, dtype: DType, rows: int) -> tuple[Problem, Array, Array]:
    """A batch of so many rows, some of which are rows of `problem` in the same group, wherever they come to lie.

    Returns it with the places of these rows in it and in `problem`.
    """
    groups = len(problem.sizes)
    sizes = draw_sizes(rng, groups, rows)
    x = draw(rng, (rows, problem.x.shape[1]), dtype, "outliers")
    here, there = [], []
    for size, start, own, first in zip(sizes, offsets(sizes), problem.sizes, offsets(problem.sizes), strict=False):
        count = min(size, own, rng.integers(1, 20))
        here.append(start + rng.permutation(size)[:count])
        there.append(first + rng.permutation(own)[:count])
    places, sources = (np.concatenate(parts).astype(np.int64) for parts in (here, there))
    x[places] = problem.x[sources]
    return replace(problem, x=x, dy=problem.dy[:0], sizes=sizes), places, sources


@needs("layer", selections.batch_invariant_recipes)
def test_a_row_has_the_same_bits_in_every_batch(case: Case, rng: Rng, full: bool) -> None:
    """Other rows, other group sizes, another tail and another number of rows leave a row of y as it was: what a sampler
    computes token by token is what the trainer computes."""
    if not case.capability("fprop").batch_invariant:
        pytest.skip("the card declares no batch_invariant for fprop")
    problem = draw_problem(rng, case.dtype)
    y = run_layer(case, problem, backward=False).y
    for rows in MORE_ROWS if full else ROWS:
        batch, places, sources = other_batch(problem, rng, case.dtype, rows)
        moved = run_layer(case, batch, backward=False).y
        assert_same_bits(moved[places], y[sources], f"rows of y in a batch of {rows}")
