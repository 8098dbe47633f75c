"""The work of `octavo bench ep --framework jax`: a MoE block on one device, and with its experts over several."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax

from octavo import DelayedScaling
from octavo.quantizer import ROW_BY_ROW
from octavo_bench.ep.block import Block, compiled_step, draw_block, received_bytes
from octavo_bench.ep.gathers import LAYERS, gathered_bytes, gathering_step
from octavo_bench.ep.nvlink import received_in_a_step
from octavo_bench.ep.options import EpOptions
from octavo_bench.ep.rows import EpRow, Gathered
from octavo_bench.errors import InputError
from octavo_bench.harness.engine.jax import JaxEngine
from octavo_bench.harness.problem import backends_of, layer_plan
from octavo_bench.harness.recipes import family_of, recipe_of
from octavo_bench.harness.run import Run
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Call
from octavo_jax.moe import Exchange


@dataclass(frozen=True, slots=True)
class _Case:
    kind: str
    devices: int
    way: str = ""
    payload: bool = False

    @property
    def text(self) -> str:
        """On a line of progress or of failure."""
        codes = " as codes" if self.payload else ""
        return f"{self.devices} device{'s' if self.devices > 1 else ''} {self.way}{codes}".strip()


def ep_rows(run: Run[EpOptions]) -> Iterator[EpRow | Gathered]:
    """Blocks on one device and on all of them, then the kernels that FSDP gathers."""
    options = run.options
    engine = JaxEngine(options.chosen_device)
    platform = "gpu" if options.chosen_device == "cuda" else options.chosen_device
    devices = options.devices_of(len(jax.devices(platform)))
    run.parts |= {
        "choices": options.chosen_choices,
        "slack": options.slack,
        "framework": "jax",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    counts = (1, devices) if devices > 1 else (1,)
    if devices == 1:
        run.notes.append(
            "JAX sees one device, so there is nothing to spread over; on a CPU "
            "XLA_FLAGS=--xla_force_host_platform_device_count=4 makes four"
        )
    for shape in options.chosen_shapes:
        for count in counts:
            block = draw_block(platform, count, shape, options.chosen_choices, options.chosen_seed)
            for case in _cases(options, count):
                run.say(f"{shape.label}, {case.kind}, {case.text} ...")
                make = partial(_row, engine, block, shape, case, options)
                yield from run.attempt(make, shape, "even", case.kind, case.text)
            del block
            engine.release()
        for kind in options.chosen_kinds if devices > 1 else ():
            gather = partial(_gathered, engine, platform, devices, shape, kind, options)
            yield from run.attempt(gather, shape, "even", kind, "kernel gathered")
            engine.release()


def _cases(options: EpOptions, devices: int) -> Iterator[_Case]:
    for kind in options.chosen_kinds:
        if devices == 1:
            yield _Case(kind, 1)
            continue
        for way in options.chosen_ways:
            yield _Case(kind, devices, way)
            if family_of(kind) in ROW_BY_ROW:
                yield _Case(kind, devices, way, payload=True)


def _row(engine: JaxEngine, block: Block, shape: Shape, case: _Case, options: EpOptions) -> EpRow:
    recipe = recipe_of(case.kind)
    if isinstance(recipe, DelayedScaling):
        raise InputError("--recipes names delayed, which keeps a state; bench ep times recipes without one")
    spread, backend = case.devices > 1, options.chosen_backend
    exchange = Exchange(
        way=case.way if spread else None,  # type: ignore[arg-type]
        payload=recipe if case.payload else None,
        rows=math.ceil(options.slack * shape.rows / case.devices) if spread else None,
    )
    program = compiled_step(block, options.chosen_choices, recipe, exchange, backend)
    dropped = program(block.arrays)[-1]
    step = partial(program, block.arrays)
    return EpRow(
        shape=shape,
        kind=case.kind,
        devices=case.devices,
        way=case.way,
        payload=case.payload,
        backends=backends_of(layer_plan(engine, replace(shape, n=2 * shape.n), recipe, backend, weight="kn")),
        received=received_bytes(program, case.devices) if spread else 0,
        nvlink=_over_nvlink(engine, step, case.devices) if spread else None,
        dropped=0 if dropped is None else int(dropped),
        times=engine.times([step], options.chosen_repeats),
    )


def _gathered(engine: JaxEngine, platform: str, devices: int, shape: Shape, kind: str, options: EpOptions) -> Gathered:
    program, arrays = gathering_step(
        platform, devices, shape, recipe_of(kind), options.chosen_backend, options.chosen_seed
    )
    moved = _over_nvlink(engine, partial(program, arrays), devices)
    return Gathered(shape, kind, devices, gathered_bytes(program), None if moved is None else moved // LAYERS)


def _over_nvlink(engine: JaxEngine, step: Call, devices: int) -> int | None:
    """Bytes that a device receives in a step, by the GPUs' counters; None on CPUs and where there are none."""
    return received_in_a_step(partial(engine.batch, [step]), devices) if engine.device == "cuda" else None
