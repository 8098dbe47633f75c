"""The work of `octavo bench host`: what Python, the public API and a graph's gaps cost beside the kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

from octavo_bench.harness.attempts import Attempts
from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.problem import Data, Names, backends_of, draw, layer_plan
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.results import facts_of
from octavo_bench.harness.shapes import Shape, sizes_of
from octavo_bench.host.row import SIDE, ApiRow, HostResults, HostRow
from octavo_bench.host.torch import host_of_layer, host_of_torch, raw_calls, times_and_graph
from octavo_bench.step.row import PEER
from octavo_bench.training.torch import torch_steps

Say = Callable[[str], None]

_HOST_REPEATS = {"cuda": 60, "cpu": 3}


@dataclass(frozen=True, slots=True)
class Choices:
    """What the command line asked for, checked.

    groups          numbers of experts of the host's table
    rows            of its layers
    backend         of eager calls; in_graphs: of captured ones
    """

    device: str
    shapes: tuple[Shape, ...]
    sizes: tuple[str, ...]
    kinds: tuple[str, ...]
    groups: tuple[int, ...]
    rows: int
    backend: Names
    in_graphs: Names
    repeats: int
    seed: int


def bench_host(choices: Choices, command: str, say: Say) -> HostResults:
    """Run everything; `say` hears where it is. A row that fails is kept as a `Failure`, and the others go on."""
    start = time.perf_counter()
    engine = TorchEngine(choices.device)
    host: Attempts[HostRow] = Attempts()
    layers: Attempts[ApiRow] = Attempts()
    for kind, groups in product((PEER, *choices.kinds), choices.groups):
        say(f"{kind}, {groups} experts ...")
        shape = Shape("host", groups, SIDE, SIDE, choices.rows)
        peer = "torch's own" if kind == PEER else None
        host.add(partial(_host_row, engine, shape, kind, choices), shape, "even", kind, "host time", peer)
    for shape, name in product(choices.shapes, choices.sizes):
        say(f"{shape.label}, {name} ...")
        sizes = sizes_of(shape, name, choices.seed).sizes
        data = draw(engine, shape, choices.seed)
        for kind in choices.kinds:
            layers.add(partial(_api_row, engine, data, name, sizes, kind, choices), shape, name, kind, "layer", None)
        del data
        engine.release()
    return HostResults(
        **facts_of(choices, command, start),
        host=host.rows,
        layers=layers.rows,
        notes=[*host.told_once(), *layers.told_once()],
        failures=[*host.failures, *layers.failures],
    )


def _backends(engine: TorchEngine, shape: Shape, kind: str, backend: Names) -> tuple[str, ...]:
    plan = layer_plan(engine, shape, recipe_of(kind), backend)
    return backends_of(plan)


def _host_row(engine: TorchEngine, shape: Shape, kind: str, choices: Choices) -> HostRow:
    repeats = _HOST_REPEATS[choices.device]
    if kind == PEER:
        return HostRow(kind, shape.groups, (), host_of_torch(engine, shape.groups, shape.rows, repeats), False)
    backends = _backends(engine, shape, kind, choices.backend)
    times = host_of_layer(engine, kind, shape.groups, shape.rows, choices.backend, repeats)
    return HostRow(kind, shape.groups, backends, times, engine.cuda)


def _api_row(engine: TorchEngine, data: Data, name: str, sizes: tuple[int, ...], kind: str, choices: Choices) -> ApiRow:
    backends = _backends(engine, data.shape, kind, choices.backend)
    ways = [
        raw_calls(engine, data, sizes, kind, choices.backend),
        torch_steps(engine, data, sizes, kind, choices.backend, reuse=False),
    ]
    if not engine.cuda:
        raw, api = (engine.times(calls, choices.repeats) for calls in ways)
        return ApiRow(data.shape, name, kind, backends, api, raw, None, False)
    captured = torch_steps(engine, data, sizes, kind, choices.in_graphs, reuse=False)
    raw, api, graph = times_and_graph(ways, captured[0], choices.repeats)
    return ApiRow(data.shape, name, kind, backends, api, raw, graph, True)
