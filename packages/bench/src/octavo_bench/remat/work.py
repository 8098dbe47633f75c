"""The work of `octavo bench remat`: a block of layers under each policy of `jax.checkpoint`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax

from octavo_bench.harness.engine.jax import JaxEngine
from octavo_bench.harness.pacing import time_ratio
from octavo_bench.harness.problem import backends_of, layer_plan
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.run import Run, problems
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Call
from octavo_bench.remat.benchmark import PEER, PLAIN, POLICIES, RematOptions, RematRow
from octavo_bench.remat.block import operands, step
from octavo_jax.counting import count_runs


def remat_rows(run: Run[RematOptions]) -> Iterator[RematRow]:
    """Each kind under each policy, plain remat first: the others are timed in turns with it."""
    options = run.options
    engine = JaxEngine(options.chosen_device)
    jax.config.update("jax_enable_compilation_cache", False)  # type: ignore[no-untyped-call]
    run.parts |= {"layers": options.layers, "unrolled": options.unroll}
    for shape, name, sizes in problems(run):
        plain: dict[str, list[Call]] = {}
        for kind, policy in _cases(options):
            run.say(f"{kind}, {policy} ...")
            make = partial(_row, engine, shape, (name, sizes), (kind, policy), options, plain)
            yield from run.attempt(make, shape, name, kind, policy, PEER if kind == PEER else None)
            engine.release()


def _cases(options: RematOptions) -> Iterator[tuple[str, str]]:
    for kind in options.chosen_kinds:
        for policy in POLICIES:
            yield kind, policy
    if options.peers and not options.quick:
        yield PEER, PLAIN


def _row(
    engine: JaxEngine,
    shape: Shape,
    grouping: tuple[str, tuple[int, ...]],
    case: tuple[str, str],
    options: RematOptions,
    plain: dict[str, list[Call]],
) -> RematRow:
    """A row; `plain` holds each kind's calls with plain remat."""
    (name, sizes), (kind, policy) = grouping, case
    backends: tuple[str, ...] = ()
    if kind != PEER:
        backends = backends_of(layer_plan(engine, shape, recipe_of(kind), options.chosen_backend, weight="kn"))
    arrays = operands("bf16" if kind == PEER else kind, shape, options.layers, sizes, options.chosen_seed)
    function = step(kind, policy, options.chosen_backend, unroll=options.unroll)
    began = time.perf_counter()
    lowered = jax.jit(function).lower(arrays)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    runs = count_runs(function, arrays)
    memory: Any = compiled.memory_analysis()
    calls = [lambda: compiled(arrays)]
    times = engine.times(calls, options.chosen_repeats)
    faster = 1 / time_ratio((engine, plain[kind]), (engine, calls)) if kind in plain else None
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
