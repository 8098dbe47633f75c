"""A captured plan replays with other sizes and other values, and takes no sizes from the host (product, promise 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.oracles.layers import run_layer
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import Array, Rng, draw_sizes
from octavo_conformance.problems.operands import MAIN, SEED, Problem, draw_problem

M, _, _, G = MAIN


def _capture_of(case: Case) -> Callable[..., Any]:
    """The bridge's capture(function, *arrays) -> replay(*arrays), or a skip that says what is missing."""
    if case.target.device.kind != "cuda":
        pytest.skip(f"graph capture needs a cuda device; this one is {case.target.device.kind}")
    capture: Callable[..., Any] | None = getattr(case.bridge, "capture", None)
    if capture is None:
        pytest.skip(f"the bridge of {case.bridge.name} has no capture(function, *arrays); graphs cannot be reached")
    return capture


def _layer_of(case: Case, problem: Problem) -> Callable[..., tuple[object, ...]]:
    """y, dx and dw of arrays x, w, sizes and dy, with the problem's scales."""
    scales = {name: case.array(scale) for name, scale in problem.scales.items()} if case.recipe.stateful else None

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

    return layer


def _edges() -> list[Array]:
    """No rows at all, and all of them in one group."""
    one = np.zeros(G, np.int32)
    one[1] = M
    return [np.zeros(G, np.int32), one]


@needs("layer", selections.base_recipes, sizes="device", graph_safe=True)
def test_replay_equals_eager(case: Case, rng: Rng, full: bool) -> None:
    """Captured once, replayed with changed sizes, inputs and weights: bit for bit the eager result (faults 33, 35,
    36, 37). Needs a device with graphs, and a front end whose bridge has `capture(function, *arrays) -> replay`."""
    capture = _capture_of(case)
    first = draw_problem(rng, case.dtype)

    def arrays(problem: Problem) -> list[object]:
        return [case.array(getattr(problem, name)) for name in ("x", "w", "sizes", "dy")]

    replay = capture(_layer_of(case, first), *arrays(first))
    for sizes in [*_edges(), *(draw_sizes(rng, G, M) for _ in range(48 if full else 3))]:
        problem = draw_problem(rng, case.dtype, sizes=sizes)
        problem.scales.update(first.scales)
        eager = run_layer(case, problem, bias=False)
        captured = replay(*arrays(problem))
        for name, array in zip(("y", "dx", "dw"), captured, strict=True):
            assert_same_bits(np.asarray(case.numpy(array)), eager.arrays()[name], f"{name} of a replay")


@needs("layer", selections.mx_recipe, sizes="device", graph_safe=True)
def test_host_sizes_are_not_captured(case: Case, rng: Rng) -> None:
    """A graph would copy them again from memory that is gone: refused, in words that name the host (fault 36)."""
    capture = _capture_of(case)
    problem = draw_problem(rng, case.dtype)
    layer = _layer_of(case, problem)
    with pytest.raises(Exception, match="host"):
        capture(
            lambda x, w, dy: layer(x, w, problem.sizes.tolist(), dy),
            *(case.array(getattr(problem, name)) for name in ("x", "w", "dy")),
        )
    # the device is none the worse
    run_layer(case, problem, bias=False)
