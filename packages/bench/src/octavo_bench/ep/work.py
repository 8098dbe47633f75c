"""The work of `octavo bench ep`: a MoE block on one device, and with its experts spread over several."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax

from octavo import DelayedScaling
from octavo_bench.ep.block import Block, compiled_step, draw_block, received_bytes
from octavo_bench.ep.gathers import LAYERS, gathered_bytes, gathering_step
from octavo_bench.ep.nvlink import received_in_a_step
from octavo_bench.ep.row import EpResults, EpRow, Gathered, ep_goals, gathered_goals
from octavo_bench.errors import InputError, RunError
from octavo_bench.harness.attempts import Attempts, check_layers
from octavo_bench.harness.engine.jax import JaxEngine
from octavo_bench.harness.problem import Names, backends_of
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.results import facts_of
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Call
from octavo_jax.dispatch.layer import LayerOptions, layer_for
from octavo_jax.moe import Exchange

Say = Callable[[str], None]

PAYLOADS = ("row", "block", "mxfp8")
"""Kinds whose tokens may travel as codes."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the command line asked for, checked. Shapes are experts' (G, K, F, M); devices 0: all there are."""

    device: str
    devices: int
    shapes: tuple[Shape, ...]
    k: int
    kinds: tuple[str, ...]
    ways: tuple[str, ...]
    slack: float
    backend: Names
    repeats: int
    seed: int


@dataclass(frozen=True, slots=True)
class _Case:
    kind: str
    devices: int
    way: str = ""
    payload: bool = False

    @property
    def told(self) -> str:
        """On a line of progress or of failure."""
        codes = " as codes" if self.payload else ""
        return f"{self.devices} device{'s' if self.devices > 1 else ''} {self.way}{codes}".strip()


def bench_ep(choices: Choices, command: str, say: Say) -> EpResults:
    """Run everything; `say` hears where it is. A row that fails is kept as a `Failure`, and the others go on."""
    start = time.perf_counter()
    engine = JaxEngine(choices.device)
    platform = "gpu" if choices.device == "cuda" else choices.device
    devices = _checked(choices, len(jax.devices(platform)))
    made: Attempts[EpRow] = Attempts()
    gathers: Attempts[Gathered] = Attempts()
    for shape in choices.shapes:
        for count in (1, devices):
            block = draw_block(platform, count, shape, choices.k, choices.seed)
            for case in _cases(choices, count):
                say(f"{shape.label}, {case.kind}, {case.told} ...")
                made.add(partial(_row, engine, block, shape, case, choices), shape, "even", case.kind, case.told, None)
            del block
            engine.release()
        for kind in choices.kinds if devices > 1 else ():
            gather = partial(_gathered, engine, platform, devices, shape, kind, choices)
            gathers.add(gather, shape, "even", kind, "kernel gathered", None)
            engine.release()
    rows = [replace(row, goals=ep_goals(row, made.rows)) if choices.device == "cuda" else row for row in made.rows]
    kernels = gathers.rows
    if choices.device == "cuda":  # XLA:CPU gathers bf16 as fp32
        kernels = [replace(row, goals=gathered_goals(row, kernels)) for row in kernels]
    return EpResults(
        **facts_of(choices, command, start, "jax"),
        k=choices.k,
        slack=choices.slack,
        rows=rows,
        gathered=kernels,
        notes=[*made.told_once(), *gathers.told_once()],
        failures=[*made.failures, *gathers.failures],
    )


def check_ep(results: EpResults) -> None:
    """RunError where a row failed, choices were dropped, or no backend served any."""
    check_layers(results, "rows")
    lost = [row for row in results.rows if row.dropped]
    if lost:
        raise RunError(
            f"{lost[0].dropped} choices found no row with {lost[0].way}; give more --slack than {results.slack}"
        )


def _checked(choices: Choices, found: int) -> int:
    devices = choices.devices or found
    if not 1 <= devices <= found:
        raise InputError(
            f"--devices is {devices} and JAX sees {found} here; on a CPU "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={devices} makes that many"
        )
    for shape in choices.shapes:
        if shape.groups % devices or shape.rows % (choices.k * devices) or choices.k > shape.groups:
            raise InputError(
                f"{shape.label} with {choices.k} choices a token is not cut evenly among {devices} devices; give G and "
                "M / choices that are multiples of them, and no more choices than G"
            )
    return devices


def _cases(choices: Choices, devices: int) -> Iterator[_Case]:
    for kind in choices.kinds:
        if devices == 1:
            yield _Case(kind, 1)
            continue
        for way in choices.ways:
            yield _Case(kind, devices, way)
            if kind in PAYLOADS:
                yield _Case(kind, devices, way, payload=True)


def _row(engine: JaxEngine, block: Block, shape: Shape, case: _Case, choices: Choices) -> EpRow:
    recipe = recipe_of(case.kind)
    if isinstance(recipe, DelayedScaling):
        raise InputError("--kinds names delayed, which keeps a state; bench ep times recipes without one")
    spread = case.devices > 1
    exchange = Exchange(
        way=case.way if spread else None,  # type: ignore[arg-type]
        payload=recipe if case.payload else None,
        rows=math.ceil(choices.slack * shape.rows / case.devices) if spread else None,
    )
    program = compiled_step(block, choices.k, recipe, exchange, choices.backend)
    dropped = program(block.arrays)[-1]
    options = LayerOptions.of(recipe, backend=choices.backend)
    layer = layer_for(options, block.arrays["x"], block.arrays["wi"])
    step = partial(program, block.arrays)
    times = engine.times([step], choices.repeats)
    return EpRow(
        shape,
        case.kind,
        case.devices,
        case.way,
        case.payload,
        backends_of(layer.plan),
        received_bytes(program, case.devices) if spread else 0,
        _over_nvlink(engine, step, case.devices) if spread else None,
        0 if dropped is None else int(dropped),
        times,
    )


def _gathered(engine: JaxEngine, platform: str, devices: int, shape: Shape, kind: str, choices: Choices) -> Gathered:
    program, given = gathering_step(platform, devices, shape, recipe_of(kind), choices.backend, choices.seed)
    moved = _over_nvlink(engine, partial(program, given), devices)
    return Gathered(shape, kind, devices, gathered_bytes(program), None if moved is None else moved // LAYERS)


def _over_nvlink(engine: JaxEngine, step: Call, devices: int) -> int | None:
    """Bytes that a device receives in a step, by the GPUs' counters; None on CPUs and where there are none."""
    return received_in_a_step(partial(engine.batch, [step]), devices) if engine.device == "cuda" else None
