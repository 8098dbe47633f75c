"""Under jit or torch.compile the layer is the same layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.oracles.layers import assert_layer, run_layer
from octavo_conformance.problems.case import Case, Measure
from octavo_conformance.problems.inputs import Rng, draw_sizes
from octavo_conformance.problems.operands import MAIN, draw_problem
from octavo_conformance.suite.layer.test_metamorphic import picking_weights


@needs("layer", selections.compiled_recipes)
def test_compiled_equals_eager(case: Case, rng: Rng, measure: Measure) -> None:
    """Weights that pick columns show the codes of x and dy in y and dx: compiled and eager agree to the bit, for
    changed sizes without recompiling; on Gaussian weights both keep the bound (faults 46, 63)."""
    problem = draw_problem(rng, case.dtype)
    assert_layer(case, problem, run_layer(case, problem, compiled=True), measure)
    picking = replace(problem, w=picking_weights(case.dtype, np.exp2(np.arange(MAIN[3]) % 3 - 1.0)))
    for _ in range(2):
        changed = replace(picking, sizes=draw_sizes(rng, MAIN[3], MAIN[0]))
        eager, compiled = run_layer(case, changed), run_layer(case, changed, compiled=True)
        for name in ("y", "dx"):
            assert_same_bits(compiled.arrays()[name], eager.arrays()[name], f"{name}, compiled")
