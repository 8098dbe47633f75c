"""A layer that a front end spreads over devices is the layer of each device's tokens, dw the sum of theirs."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.oracles.layers import run_layer
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import Rng
from octavo_conformance.problems.operands import Problem, draw_problem

SHARDS = {4: (2, 2), 2: (1, 2)}
"""Of experts, and of tokens, by the devices that there must be."""

SHAPE = (96, 256, 48, 2)
"""(M, K, N, G) of a block: half of K is a whole number of every recipe's blocks."""

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of the dtypes: twice what one rounding is off by."""


@needs("layer", selections.mx_recipe)
def test_sharded_against_single_device(case: Case, rng: Rng) -> None:
    """Tokens and the kernel's K on two devices, experts on as many where there are four: y and dx are the bits of each
    block alone, dw is the sum over tokens' shards, rounded once (product: one call on every mesh)."""
    kind, shards = case.target.device.kind, getattr(case.bridge, "shards", None)
    if shards is None:
        pytest.skip(f"{case.bridge.name}'s front end shards by processes, not within one")
    there = shards(kind)
    if there < min(SHARDS):
        pytest.skip(f"needs {min(SHARDS)} {kind} devices and {case.bridge.name} sees {there}")
    E, F = SHARDS[max(needed for needed in SHARDS if needed <= there)]
    G = SHAPE[3]
    w = np.concatenate([draw_problem(rng, case.dtype, SHAPE).w for _ in range(E)])
    blocks = [[_block(rng, case, w[e * G : e * G + G]) for _ in range(F)] for e in range(E)]

    def stacked(name: str) -> np.ndarray:
        return np.stack([np.stack([getattr(block, name) for block in row]) for row in blocks])

    with case.admitted(k=SHAPE[1], n=SHAPE[2], groups=G):
        result = case.bridge.sharded_linear(  # type: ignore[attr-defined]
            stacked("x"), w, stacked("sizes"), stacked("dy"), device=kind, recipe=case.recipe, backend=case.backend
        )
    y, dx, dw = (case.numpy(array) for array in (result.y, result.dx, result.dw))
    for e, row in enumerate(blocks):
        alone = [run_layer(case, block, bias=False) for block in row]
        for f, outcome in enumerate(alone):
            assert outcome.dx is not None
            assert_same_bits(y[e, f], outcome.y, f"y of block {e}, {f}")
            assert_same_bits(dx[e, f], outcome.dx, f"dx of block {e}, {f}")
        each = np.stack([np.asarray(outcome.dw, np.float64) for outcome in alone])
        # each part was rounded once, and the sum, too
        atol = np.abs(each).sum(axis=0) * EPSILON[case.dtype]
        off = np.abs(dw[e * G : e * G + G].astype(np.float64) - each.sum(axis=0))
        assert (off <= atol).all(), f"dw of expert block {e} is off by {off.max():.3g}"


def _block(rng: Rng, case: Case, w: np.ndarray) -> Problem:
    problem = draw_problem(rng, case.dtype, SHAPE)
    return Problem(problem.x, w, problem.dy, problem.sizes, problem.bias, problem.scales)
