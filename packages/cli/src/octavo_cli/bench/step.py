"""The work of `octavo bench step`: forward and backward of a grouped linear layer in every recipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from octavo_cli.bench.attempts import Attempts
from octavo_cli.bench.engine import Engine, make_engine
from octavo_cli.bench.gemm_cases import recipe_of
from octavo_cli.bench.gemm_problem import Data, Names, draw, layer_plan
from octavo_cli.bench.results import machine, versions
from octavo_cli.bench.shapes import Shape, sizes_of
from octavo_cli.bench.step_goals import StepNeighbours, step_goals
from octavo_cli.bench.step_results import PEER, StepResults, StepRow
from octavo_cli.bench.timing import Call

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Choices:
    """What the command line asked for, checked.

    reuse   also with weights that are quantized once (torch)
    peers   also the frameworks' own bf16
    """

    frameworks: tuple[str, ...]
    device: str
    shapes: tuple[Shape, ...]
    sizes: tuple[str, ...]
    kinds: tuple[str, ...]
    reuse: bool
    peers: bool
    backend: Mapping[str, Names]
    repeats: int
    seed: int


@dataclass(frozen=True, slots=True)
class StepCase:
    """A kind of `gemm_cases`, or the framework's own bf16 (`PEER`)."""

    kind: str
    reuse: bool = False


def bench_step(choices: Choices, command: str, say: Say) -> StepResults:
    """Run everything; `say` hears where it is. A step that fails is kept as a `Failure`, and the others go on."""
    start = time.perf_counter()
    engines = [make_engine(name, choices.device) for name in choices.frameworks]
    facts = machine(choices.device, choices.frameworks[0])
    rate = engines[0].copy_rate()
    made: Attempts[StepRow] = Attempts()
    groupings: dict[str, list[int]] = {}
    for shape, name, engine in product(choices.shapes, choices.sizes, engines):
        sizes = sizes_of(shape, name, choices.seed).sizes
        groupings[f"{shape.label}, {name}"] = list(sizes)
        say(f"{shape.label}, {name}, {engine.framework} ...")
        data = draw(engine, shape, choices.seed)
        for case in _cases(engine.framework, choices):
            peer = f"{engine.framework}'s own" if case.kind == PEER else None
            made.add(
                partial(_row, engine, data, name, sizes, case, choices), shape, name, case.kind, engine.framework, peer
            )
        del data
        engine.release()
    rows = made.rows
    if choices.device == "cuda":
        near = StepNeighbours(tuple(rows), rate, "H200" in str(facts.get("gpu")))
        rows = [replace(row, goals=step_goals(row, near)) for row in rows]
    return StepResults(
        command=command,
        device=choices.device,
        dtype="bfloat16",
        seed=choices.seed,
        repeats=choices.repeats,
        machine=facts,
        seconds=time.perf_counter() - start,
        versions=versions(),
        frameworks=choices.frameworks,
        copy_tb_per_s=rate,
        groupings=groupings,
        rows=rows,
        notes=made.told_once(),
        failures=made.failures,
    )


def _cases(framework: str, choices: Choices) -> Iterator[StepCase]:
    if choices.peers:
        yield StepCase(PEER)
    for kind in choices.kinds:
        yield StepCase(kind)
        if choices.reuse and kind != "bf16" and framework == "torch":
            yield StepCase(kind, reuse=True)


def _row(engine: Engine, data: Data, name: str, sizes: tuple[int, ...], case: StepCase, choices: Choices) -> StepRow:
    backends: tuple[str, ...] = ()
    backend = choices.backend[engine.framework]
    if case.kind != PEER:
        # asked first: a layer that nothing serves is a note, whatever the front end says
        plan = layer_plan(
            engine, data.shape, recipe_of(case.kind), backend, weight="kn" if engine.framework == "jax" else "nk"
        )
        backends = tuple(dict.fromkeys(made.backend for made in plan.plans))
    times = engine.times(_calls(engine, data, sizes, case, backend), choices.repeats)
    return StepRow(engine.framework, data.shape, name, case.kind, case.reuse, backends, times)


def _calls(engine: Engine, data: Data, sizes: tuple[int, ...], case: StepCase, backend: Names) -> list[Call]:
    if engine.framework == "jax":
        from octavo_cli.bench.step_jax import jax_steps

        return jax_steps(engine, data, sizes, case.kind, backend)
    from octavo_cli.bench.step_torch import torch_steps

    return torch_steps(engine, data, sizes, case.kind, backend, reuse=case.reuse)
