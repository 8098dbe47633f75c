"""The work of `octavo bench step`: forward and backward of a grouped linear layer in every recipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from octavo_bench.harness.attempts import Attempts
from octavo_bench.harness.engine.protocol import Engine, make_engine
from octavo_bench.harness.problem import Data, Names, backends_of, draw, layer_plan
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.results import facts_of
from octavo_bench.harness.shapes import Shape, sizes_of
from octavo_bench.harness.timing import Call
from octavo_bench.harness.turns import over
from octavo_bench.step.goals import StepNeighbours, step_goals
from octavo_bench.step.row import PEER, StepResults, StepRow
from octavo_registry import Weight

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


@dataclass(frozen=True, slots=True)
class Ran:
    """What the rows of one framework at one shape share."""

    engine: Engine
    data: Data
    sizes: tuple[int, ...]

    def calls(self, case: StepCase, choices: Choices) -> list[Call]:
        """One a set of buffers."""
        backend = choices.backend[self.engine.framework]
        if self.engine.framework == "jax":
            from octavo_bench.training.jax import jax_steps

            return jax_steps(self.engine, self.data, self.sizes, case.kind, backend)
        from octavo_bench.training.torch import torch_steps

        return torch_steps(self.engine, self.data, self.sizes, case.kind, backend, reuse=case.reuse)


def bench_step(choices: Choices, command: str, say: Say) -> StepResults:
    """Run everything; `say` hears where it is. A step that fails is kept as a `Failure`, and the others go on."""
    start = time.perf_counter()
    engines = [make_engine(name, choices.device) for name in choices.frameworks]
    rate = engines[0].copy_rate()
    made: Attempts[StepRow] = Attempts()
    groupings: dict[str, list[int]] = {}
    for shape, name in product(choices.shapes, choices.sizes):
        sizes = sizes_of(shape, name, choices.seed).sizes
        groupings[f"{shape.label}, {name}"] = list(sizes)
        _rows(engines, shape, name, sizes, choices, made, say)
        for engine in engines:
            engine.release()
    about = facts_of(choices, command, start, choices.frameworks[0])
    rows = made.rows
    if choices.device == "cuda":
        near = StepNeighbours(tuple(rows), rate, "H200" in str(about["machine"].get("gpu")))
        rows = [replace(row, goals=step_goals(row, near)) for row in rows]
    return StepResults(
        **about,
        frameworks=choices.frameworks,
        copy_tb_per_s=rate,
        groupings=groupings,
        rows=rows,
        notes=made.told_once(),
        failures=made.failures,
    )


def _rows(
    engines: Sequence[Engine],
    shape: Shape,
    name: str,
    sizes: tuple[int, ...],
    choices: Choices,
    made: Attempts[StepRow],
    say: Say,
) -> None:
    """The rows of one shape; where there is a row of torch, JAX's is timed beside it."""
    earlier: dict[str, Ran] = {}
    for engine in engines:
        say(f"{shape.label}, {name}, {engine.framework} ...")
        ran = Ran(engine, draw(engine, shape, choices.seed), sizes)
        here = []
        for case in _cases(engine.framework, choices):
            peer = f"{engine.framework}'s own" if case.kind == PEER else None
            before = len(made.rows)
            make = partial(_row, ran, name, case, choices, earlier.get(case.kind))
            made.add(make, shape, name, case.kind, engine.framework, peer)
            if len(made.rows) > before and peer is None:
                here.append(case.kind)
        earlier = dict.fromkeys(here, ran)
        engine.release()


def _cases(framework: str, choices: Choices) -> Iterator[StepCase]:
    if choices.peers:
        yield StepCase(PEER)
    for kind in choices.kinds:
        yield StepCase(kind)
        if choices.reuse and kind != "bf16" and framework == "torch":
            yield StepCase(kind, reuse=True)


def _row(ran: Ran, name: str, case: StepCase, choices: Choices, beside: Ran | None) -> StepRow:
    """A row; where it has one of torch `beside` it, its time over that one's as well."""
    engine, shape = ran.engine, ran.data.shape
    backends: tuple[str, ...] = ()
    if case.kind != PEER:
        # asked first: a layer that nothing serves is a note, whatever the front end says
        weight: Weight = "kn" if engine.framework == "jax" else "nk"
        plan = layer_plan(engine, shape, recipe_of(case.kind), choices.backend[engine.framework], weight=weight)
        backends = backends_of(plan)
    calls = ran.calls(case, choices)
    times = engine.times(calls, choices.repeats)
    over_torch = None
    if beside is not None:
        over_torch = over((beside.engine, beside.calls(case, choices)), (engine, calls))
    return StepRow(engine.framework, shape, name, case.kind, case.reuse, backends, times, over_torch=over_torch)
