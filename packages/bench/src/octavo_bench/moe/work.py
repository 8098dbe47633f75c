"""The work of `octavo bench moe`: forward and backward of whole MoE layers, and of the same on torch's bf16."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from octavo_bench.harness.attempts import Attempts
from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.problem import Names, backends_of
from octavo_bench.harness.results import facts_of
from octavo_bench.harness.shapes import Shape
from octavo_bench.moe.row import PEERS, MoeResults, MoeRow, moe_goals
from octavo_bench.moe.torch import Layer, draw_layer, own_calls, plan_of, torch_calls

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Choices:
    """What the command line asked for, checked. Shapes are experts' (G, K, F, M)."""

    device: str
    shapes: tuple[Shape, ...]
    choices: int
    kinds: tuple[str, ...]
    peers: bool
    backend: Names
    repeats: int
    seed: int


def bench_moe(choices: Choices, command: str, say: Say) -> MoeResults:
    """Run everything; `say` hears where it is. A row that fails is kept as a `Failure`, and the others go on."""
    start = time.perf_counter()
    engine = TorchEngine(choices.device)
    made: Attempts[MoeRow] = Attempts()
    for shape in choices.shapes:
        say(f"{shape.label} ...")
        layer = draw_layer(engine, shape, choices.choices, choices.seed)
        for kind in (*(PEERS if choices.peers else ()), *choices.kinds):
            peer = kind if kind in PEERS else None
            made.add(partial(_row, engine, layer, kind, choices), shape, "even", kind, "MoE layer", peer)
        del layer
        engine.release()
    rows = made.rows
    if choices.device == "cuda":
        rows = [replace(row, goals=moe_goals(row, rows)) for row in rows]
    return MoeResults(
        **facts_of(choices, command, start),
        rows=rows,
        notes=made.told_once(),
        failures=made.failures,
    )


def _row(engine: TorchEngine, layer: Layer, kind: str, choices: Choices) -> MoeRow:
    if kind in PEERS:
        times = engine.times(own_calls(layer, kind), choices.repeats)
        return MoeRow(layer.shape, layer.choices, kind, (), times)
    plan = plan_of(layer, kind, choices.backend)
    backends = backends_of(plan.fc1.plan, plan.fc2.plan)
    times = engine.times(torch_calls(layer, kind, choices.backend), choices.repeats)
    return MoeRow(layer.shape, layer.choices, kind, backends, times)
