"""The work of `octavo bench remat`: a block of layers under each policy of `jax.checkpoint`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax

from octavo_bench.harness.attempts import Attempts
from octavo_bench.harness.engine.jax import JaxEngine
from octavo_bench.harness.problem import Names, backends_of, layer_plan
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.results import facts_of
from octavo_bench.harness.shapes import Shape, sizes_of
from octavo_bench.harness.timing import Call
from octavo_bench.harness.turns import over
from octavo_bench.remat.block import operands, step
from octavo_bench.remat.row import PEER, PLAIN, POLICIES, RematResults, RematRow, remat_goals
from octavo_jax.counting import count_runs

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Choices:
    """What the command line asked for, checked. peers: also the block on jax.lax.ragged_dot."""

    device: str
    shapes: tuple[Shape, ...]
    sizes: tuple[str, ...]
    kinds: tuple[str, ...]
    layers: int
    unroll: bool
    peers: bool
    backend: Names
    repeats: int
    seed: int


def bench_remat(choices: Choices, command: str, say: Say) -> RematResults:
    """Run everything; `say` hears where it is. A row that fails is kept as a `Failure`, and the others go on."""
    start = time.perf_counter()
    engine = JaxEngine(choices.device)
    jax.config.update("jax_enable_compilation_cache", False)  # type: ignore[no-untyped-call]
    made: Attempts[RematRow] = Attempts()
    groupings: dict[str, list[int]] = {}
    for shape, name in product(choices.shapes, choices.sizes):
        sizes = sizes_of(shape, name, choices.seed).sizes
        groupings[f"{shape.label}, {name}"] = list(sizes)
        plain: dict[str, list[Call]] = {}
        for kind, policy in _cases(choices):
            say(f"{shape.label}, {name}: {kind}, {policy} ...")
            peer = PEER if kind == PEER else None
            make = partial(_row, engine, shape, name, sizes, kind, policy, choices, plain)
            made.add(make, shape, name, kind, policy, peer)
            engine.release()
    timed = choices.device == "cuda"
    return RematResults(
        **facts_of(choices, command, start, "jax"),
        layers=choices.layers,
        unrolled=choices.unroll,
        groupings=groupings,
        rows=[replace(row, goals=remat_goals(row, made.rows, timed=timed)) for row in made.rows],
        notes=made.told_once(),
        failures=made.failures,
    )


def _cases(choices: Choices) -> Iterator[tuple[str, str]]:
    for kind in choices.kinds:
        for policy in POLICIES:
            yield kind, policy
    if choices.peers:
        yield PEER, PLAIN


def _row(
    engine: JaxEngine,
    shape: Shape,
    name: str,
    sizes: tuple[int, ...],
    kind: str,
    policy: str,
    choices: Choices,
    plain: dict[str, list[Call]],
) -> RematRow:
    """A row; `plain` holds each kind's calls with plain remat, which the others are timed beside."""
    backends: tuple[str, ...] = ()
    if kind != PEER:
        plan = layer_plan(engine, shape, recipe_of(kind), choices.backend, weight="kn")
        backends = backends_of(plan)
    given = operands("bf16" if kind == PEER else kind, shape, choices.layers, sizes, choices.seed)
    function = step(kind, policy, choices.backend, unroll=choices.unroll)
    began = time.perf_counter()
    lowered = jax.jit(function).lower(given)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    runs = count_runs(function, given)
    memory: Any = compiled.memory_analysis()
    calls = [lambda: compiled(given)]
    times = engine.times(calls, choices.repeats)
    faster = 1 / over((engine, plain[kind]), (engine, calls)) if kind in plain else None
    if policy == PLAIN:
        plain[kind] = calls
    return RematRow(
        shape,
        name,
        kind,
        policy,
        backends,
        times,
        trace_s=traced - began,
        compile_s=done - traced,
        temporary_bytes=None if memory is None else int(memory.temp_size_in_bytes),
        quantize=runs.quantize,
        fprop=runs.fprop,
        over_plain=faster,
    )
