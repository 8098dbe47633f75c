"""The work of `octavo bench step`: forward and backward of a grouped linear layer in every recipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from octavo import NoBackendError
from octavo_cli.bench.engine import Engine, make_engine
from octavo_cli.bench.gemm_cases import recipe_of
from octavo_cli.bench.gemm_problem import Data, Names, draw, layer_plan
from octavo_cli.bench.results import Failure, machine, told, versions
from octavo_cli.bench.shapes import Shape, sizes_of
from octavo_cli.bench.step_goals import StepNeighbours, step_goals
from octavo_cli.bench.step_results import PEER, StepResults, StepRow
from octavo_cli.bench.timing import Call

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Choices:
    """What the command line asked for, checked. reuse: also with weights that are quantized once."""

    framework: str
    device: str
    shapes: tuple[Shape, ...]
    sizes: tuple[str, ...]
    kinds: tuple[str, ...]
    reuse: bool
    backend: Names
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
    engine = make_engine(choices.framework, choices.device)
    facts = machine(choices.device, choices.framework)
    rate = engine.copy_rate()
    rows: list[StepRow] = []
    failures: list[Failure] = []
    notes: list[str] = []
    groupings: dict[str, list[int]] = {}
    for shape in choices.shapes:
        data = draw(engine, shape, choices.seed)
        for name in choices.sizes:
            sizes = sizes_of(shape, name, choices.seed).sizes
            say(f"{shape.label}, {name} ...")
            groupings[f"{shape.label}, {name}"] = list(sizes)
            for case in _cases(choices):
                try:
                    rows.append(_row(engine, data, name, sizes, case, choices))
                except NoBackendError as error:
                    notes.append(f"{case.kind}: {' '.join(str(error).split())[:300]}")
                except Exception as error:  # the others are worth having; the command fails at its end
                    if case.kind == PEER:
                        notes.append(f"{choices.framework}'s own: {told(error)[:160]}")
                    else:
                        failures.append(Failure(case.kind, shape.key, name, told(error)))
        del data
        engine.release()
    if choices.device == "cuda":
        near = StepNeighbours(tuple(rows), rate, "H200" in str(facts.get("gpu")), choices.framework)
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
        framework=choices.framework,
        copy_tb_per_s=rate,
        groupings=groupings,
        rows=rows,
        notes=list(dict.fromkeys(notes)),
        failures=failures,
    )


def _cases(choices: Choices) -> Iterator[StepCase]:
    yield StepCase(PEER)
    for kind in choices.kinds:
        yield StepCase(kind)
        if choices.reuse and kind != "bf16":
            yield StepCase(kind, reuse=True)


def _row(engine: Engine, data: Data, name: str, sizes: tuple[int, ...], case: StepCase, choices: Choices) -> StepRow:
    backends: tuple[str, ...] = ()
    if case.kind != PEER:
        # asked first: a layer that nothing serves is a note, whatever the front end says
        plan = layer_plan(engine, data.shape, recipe_of(case.kind), choices.backend)
        backends = tuple(dict.fromkeys(made.backend for made in plan.plans))
    times = engine.times(_calls(engine, data, sizes, case, choices.backend), choices.repeats)
    return StepRow(data.shape, name, case.kind, case.reuse, backends, times)


def _calls(engine: Engine, data: Data, sizes: tuple[int, ...], case: StepCase, backend: Names) -> list[Call]:
    if engine.framework == "jax":
        from octavo_cli.bench.step_jax import jax_steps

        return jax_steps(engine, data, sizes, case.kind, backend)
    from octavo_cli.bench.step_torch import torch_steps

    return torch_steps(engine, data, sizes, case.kind, backend, reuse=case.reuse)
