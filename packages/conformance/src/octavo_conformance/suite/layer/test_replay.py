"""Teacher-forced replay: the decisive end-to-end test (docs/numerics, "Training").

A small mixture of experts is trained by the definition, in numpy; (x, W, dY, sizes) of every grouped layer are recorded
at three steps. Each operation is then replayed on the backend: codes and scales bit for bit, results within T1 and T2.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_tensor
from octavo_conformance.oracles.layers import assert_layer, run_layer
from octavo_conformance.problems.case import OPERANDS, Case, Measure
from octavo_conformance.problems.inputs import Rng
from octavo_conformance.problems.operands import SEED, by_definition
from octavo_conformance.problems.recording import record


@needs("layer", selections.few_recipes)
def test_recorded_steps(case: Case, rng: Rng, full: bool, measure: Measure) -> None:
    """The layers of each recorded step (in quick runs the first one of two steps): weights of 2x3 blocks of 128, an
    empty and a one-row group, non-square sizes, a positive-mean activation (faults 56, 59, 65)."""
    for step in islice(record(rng, case.recipe, case.dtype), None if full else 2):
        for name, problem in (("fc1", step.fc1), ("fc2", step.fc2))[: 2 if full else 1]:
            assert 0 in problem.sizes, f"step {step.index}: no empty group was recorded"
            assert 1 in problem.sizes, f"step {step.index}: no one-row group was recorded"
            for operand in OPERANDS:
                expected = by_definition(problem, case.recipe, operand)
                if expected is None:
                    continue
                spec = expected.spec.quantizer
                tensor = case.quantize(
                    problem.of(operand),
                    None if operand == "w" else problem.sizes,
                    spec=spec,
                    seed=SEED if spec.stochastic else None,
                    scale=problem.scales[operand] if spec.scaling == "delayed" else None,
                )
                assert_same_tensor(case, tensor, expected, what=f"step {step.index}, {operand} of {name}: ")
            outcome = run_layer(case, problem)
            assert_layer(case, problem, outcome, measure, cuts=("whole",) if name == "fc1" else ())


@needs("layer", selections.few_recipes)
def test_two_optimizer_steps(case: Case, rng: Rng, measure: Measure) -> None:
    """Forward, backward, a step of the optimizer, and again on the backend's own weights (fault 65)."""
    first = next(iter(record(rng, case.recipe, case.dtype))).fc1
    problem = first
    for _ in range(2):
        outcome = run_layer(case, problem)
        assert_layer(case, problem, outcome, measure, cuts=())
        if outcome.dw is None:
            pytest.fail("dw is missing")
        w = problem.w.astype(np.float32) - 0.05 * outcome.dw.astype(np.float32)
        problem = replace(problem, w=w.astype(problem.w.dtype))
    assert problem.w.tobytes() != first.w.tobytes(), "two steps left the weights as they were"
