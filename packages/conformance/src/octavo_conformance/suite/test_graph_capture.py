"""A captured plan replays with other sizes and other values (product, promise 3)."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_conformance import variants
from octavo_conformance.case import Case
from octavo_conformance.checks import assert_same_bits
from octavo_conformance.inputs import Rng, draw_sizes
from octavo_conformance.layers import run_layer
from octavo_conformance.needs import needs
from octavo_conformance.operands import MAIN, SEED, draw_problem


@needs("layer", variants.base_recipes, sizes="device", graph_safe=True)
def test_replay_equals_eager(case: Case, rng: Rng, full: bool) -> None:
    """Captured once, replayed with changed sizes, inputs and weights: bit for bit the eager result (faults 33, 35,
    36, 37). Needs a device with graphs, and a front end whose bridge has `capture(function, *arrays) -> replay`."""
    if case.target.device.kind != "cuda":
        pytest.skip(f"graph capture needs a cuda device; this one is {case.target.device.kind}")
    capture = getattr(case.bridge, "capture", None)
    if capture is None:
        pytest.skip(f"the bridge of {case.bridge.name} has no capture(function, *arrays); graphs cannot be reached")
    first = draw_problem(rng, case.dtype)
    scales = {name: case.array(scale) for name, scale in first.scales.items()} if case.recipe.stateful else None

    def layer(x: object, w: object, sizes: object, dy: object) -> tuple[object, ...]:
        result = case.bridge.grouped_linear(
            x,
            w,
            sizes,
            dy,
            recipe=case.recipe,
            seed=SEED if case.recipe.stochastic else None,
            scales=scales,
            backend=case.backend,
        )
        return result.y, result.dx, result.dw

    def arrays(problem: object) -> list[object]:
        return [case.array(getattr(problem, name)) for name in ("x", "w", "sizes", "dy")]

    replay = capture(layer, *arrays(first))
    for _ in range(50 if full else 5):
        problem = draw_problem(rng, case.dtype, sizes=draw_sizes(rng, MAIN[3], MAIN[0]))
        problem.scales.update(first.scales)
        eager = run_layer(case, problem, bias=False)
        captured = replay(*arrays(problem))
        for name, array in zip(("y", "dx", "dw"), captured, strict=True):
            assert_same_bits(np.asarray(case.numpy(array)), eager.arrays()[name], f"{name} of a replay")
