"""The work of `octavo bench mlp`: forward and backward of expert MLPs, fused and as operations in a row."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

from octavo_bench.harness.attempts import Attempts
from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.problem import Names
from octavo_bench.harness.results import facts_of
from octavo_bench.harness.shapes import Shape, sizes_of
from octavo_bench.harness.timing import Times
from octavo_bench.mlp.row import FUSED, IN_A_ROW, WAYS, MlpResults, MlpRow, Way, mlp_goals
from octavo_bench.mlp.torch import Experts, draw_experts, own_calls, plan_of, torch_calls
from octavo_bench.step.row import PEER

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Choices:
    """What the command line asked for, checked. Shapes are experts' (G, K, F, M)."""

    device: str
    shapes: tuple[Shape, ...]
    sizes: tuple[str, ...]
    kinds: tuple[str, ...]
    probs: bool
    peers: bool
    backend: Names
    repeats: int
    seed: int


def bench_mlp(choices: Choices, command: str, say: Say) -> MlpResults:
    """Run everything; `say` hears where it is. A row that fails is kept as a `Failure`, and the others go on."""
    start = time.perf_counter()
    engine = TorchEngine(choices.device)
    made: Attempts[MlpRow] = Attempts()
    groupings: dict[str, list[int]] = {}
    for shape, name in product(choices.shapes, choices.sizes):
        sizes = sizes_of(shape, name, choices.seed).sizes
        groupings[f"{shape.label}, {name}"] = list(sizes)
        say(f"{shape.label}, {name} ...")
        experts = draw_experts(engine, shape, sizes, choices.seed, probs=choices.probs)
        if choices.peers:
            made.add(partial(_peer, engine, experts, name, choices), shape, name, PEER, IN_A_ROW, "torch's own")
        for kind in choices.kinds:
            times = cache(partial(_times, engine, experts, kind, choices))
            for way in WAYS:
                made.add(partial(_row, experts, name, kind, way, times, choices), shape, name, kind, way, None)
        del experts
        engine.release()
    rows = made.rows
    if choices.device == "cuda":
        rows = [replace(row, goals=mlp_goals(row, rows)) for row in rows]
    return MlpResults(
        **facts_of(choices, command, start),
        probs=choices.probs,
        groupings=groupings,
        rows=rows,
        notes=made.told_once(),
        failures=made.failures,
    )


def _times(engine: TorchEngine, experts: Experts, kind: str, choices: Choices) -> dict[Way, Times]:
    """Of both ways, in turns: one after the other they differ by what ran before, and not by what they do."""
    calls = [torch_calls(experts, kind, choices.backend, fused=way == FUSED) for way in WAYS]
    return dict(zip(WAYS, engine.times_in_turns(calls, choices.repeats), strict=True))


def _peer(engine: TorchEngine, experts: Experts, name: str, choices: Choices) -> MlpRow:
    return MlpRow(experts.shape, name, PEER, IN_A_ROW, (), "", engine.times(own_calls(experts), choices.repeats))


def _row(
    experts: Experts, name: str, kind: str, way: Way, times: Callable[[], dict[Way, Times]], choices: Choices
) -> MlpRow:
    plan = plan_of(experts, kind, choices.backend)
    made = (*plan.fc1.plan.plans, *plan.fc2.plan.plans)
    backends = tuple(dict.fromkeys(part.backend for part in made))
    fused = "; ".join(f"{what} {part}" for what, part in plan.fused.items()) if way == FUSED else ""
    return MlpRow(experts.shape, name, kind, way, backends, fused, times()[way])
