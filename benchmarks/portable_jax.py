"""jax-triton on the GPU that is here, beside torch-triton, which starts the same kernels, and beside XLA's ragged_dot.

python benchmarks/portable_jax.py OUTPUT COMMIT [--shape NAME] [--turns N] [--ragged-dot]

All ways of one case take turns in one process: products in bf16, steps of a layer in block scaling and in bf16, and
quantizers of x. A time is the host's clock around calls that are queued behind each other, so that frameworks whose
events do not mix are timed alike; steps return y, or XLA would leave the forward product out. A way that does not run
here is left out, and the record says why.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch has the GPU, too

import jax
import jax.numpy as jnp
from layers import LINEAR

import octavo
import octavo_jax
import octavo_registry as registry
from octavo_bench.harness.machine import machine, versions
from octavo_bench.harness.timing import times_in_turn
from octavo_jax.plugin_api import device_kind
from octavo_registry.contract import GemmRequest

MINE, PEER = "jax-triton", "torch-triton"
JAX_BACKENDS = (MINE, "jax-native")
RECIPES = ("fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4")
SHORTEST_QUEUE = 0.02
"""Seconds of calls in a queue: what it costs to wait for the last of them is then nothing."""
Call = Callable[[], object]


class Case(NamedTuple):
    """Ways to do one thing; `work` is its floating-point operations, or 0."""

    name: str
    make: dict[str, Callable[[], Call]]
    work: int


class Layer(NamedTuple):
    """x [M, K], kernel [G, K, N], dy [M, N] in bf16, and even sizes [G]."""

    x: Any
    kernel: Any
    dy: Any
    sizes: Any

    @classmethod
    def drawn(cls, groups: int, k: int, n: int, rows: int) -> Layer:
        """Normal values, whose rows differ in size: zeros would be cheaper to multiply."""

        @partial(jax.jit, static_argnums=1)
        def values(key: Any, shape: tuple[int, ...]) -> Any:
            sizes = jax.random.uniform(key, (*shape[:-1], 1), jnp.bfloat16, 0.25, 1.25)
            return jax.random.normal(key, shape, jnp.bfloat16) * sizes

        keys = jax.random.split(jax.random.key(1), 3)
        shapes = ((rows, k), (groups, k, n), (rows, n))
        arrays = [values(key, shape) for key, shape in zip(keys, shapes, strict=True)]
        return cls(*arrays, jnp.full((groups,), rows // groups, jnp.int32))

    @property
    def flops(self) -> int:
        """Of one product."""
        return 2 * self.x.shape[0] * self.kernel.shape[1] * self.kernel.shape[2]


def _called(function: Callable[..., object], *arrays: Any) -> Call:
    return partial(jax.jit(function), *arrays)


def products(layer: Layer, ragged_dot: bool) -> Iterator[Case]:
    """The three GEMMs in bf16, of kernels as JAX has them, [G, K, N]."""
    x, kernel, dy, sizes = layer
    kind, arch = device_kind(jax.devices("gpu")[0])
    groups, k, n = kernel.shape
    operands = {"fprop": (x, kernel), "dgrad": (dy, kernel), "wgrad": (x, dy)}

    def product(gemm: Any, backend: str) -> Call:
        request = GemmRequest(
            *(gemm, "jax", kind, "bfloat16", "bfloat16"),
            recipe=octavo.HighPrecision(), arch=arch, k=k, n=n, groups=groups, weight="kn",
        )  # fmt: skip
        return _called(registry.plan(request, backend=backend).run, *operands[gemm], sizes)

    of_xla = {
        "fprop": lambda: _called(jax.lax.ragged_dot, x, kernel, sizes),
        "dgrad": lambda: _called(lambda dy, w, s: jax.lax.ragged_dot(dy, w.swapaxes(1, 2), s), dy, kernel, sizes),
        "wgrad": lambda: _called(
            lambda x, w, s, dy: jax.vjp(lambda w: jax.lax.ragged_dot(x, w, s), w)[1](dy)[0], x, kernel, sizes, dy
        ),
    }
    for gemm in operands:
        make = {name: partial(product, gemm, name) for name in JAX_BACKENDS}
        if ragged_dot:
            make["jax.lax.ragged_dot"] = of_xla[gemm]
        yield Case(f"{gemm}, bf16", make, layer.flops)


def steps(layer: Layer) -> Iterator[Case]:
    """y, dx and dw, of codes with the quantizing of x, w and dy."""
    x, kernel, dy, sizes = layer

    def step(recipe: str, backend: str) -> Call:
        def both(x: Any, kernel: Any, dy: Any, sizes: Any) -> Any:
            of = octavo.recipe(recipe)
            run = partial(octavo_jax.grouped_dense, group_sizes=sizes, recipe=of, backend=backend)
            y, pull = jax.vjp(lambda x, kernel: run(x, kernel), x, kernel)
            return (y, *pull(dy))

        return _called(both, x, kernel, dy, sizes)

    for recipe in ("fp8-block", "bf16"):
        yield Case(f"step, {recipe}", {name: partial(step, recipe, name) for name in JAX_BACKENDS}, 3 * layer.flops)


def quantizers(layer: Layer) -> Iterator[Case]:
    """x in both planes, in the layouts that each backend's GEMMs read."""
    x, kernel, _, sizes = layer
    kind, arch = device_kind(jax.devices("gpu")[0])
    groups, k, n = kernel.shape

    def quantizer(recipe: octavo.Recipe, backend: str) -> Call:
        where: dict[str, Any] = {"arch": arch, "k": k, "n": n, "groups": groups, "weight": "kn"}
        request = GemmRequest("fprop", "jax", kind, "bfloat16", "bfloat16", recipe=recipe, **where)
        plan = registry.plan_layer(request, backend=backend).quantize_x
        assert plan is not None  # of recipes with codes
        spec = plan.request.quantizer
        if spec is not None and spec.scaling == "delayed":
            return _called(lambda x, sizes, scale: plan.run(x, sizes, scale=scale), x, sizes, jnp.ones(groups))
        return _called(lambda x, sizes: plan.run(x, sizes, seed=1), x, sizes)

    for text in RECIPES:
        make = {name: partial(quantizer, octavo.recipe(text), name) for name in JAX_BACKENDS}
        yield Case(f"quantize x, {text}", make, 0)


def torch_ways(label: str) -> dict[str, Callable[[], Call]]:
    """torch-triton's way to do each of the cases, by their names; none where torch or its backend is not installed."""
    import portable
    import torch

    layer = portable.Layer.drawn(*LINEAR[label])
    found: dict[str, Callable[[], Call]] = {}
    for case in (*portable.products(layer), *portable.quantizers(layer)):
        found[case.name] = case.make[PEER]
    (case,) = portable.steps(layer)
    for recipe in ("fp8-block", "bf16"):
        found[f"step, {recipe}"] = case.make[f"{PEER}, {recipe}"]

    def synchronized(make: Callable[[], Call]) -> Call:
        call = make()
        call.wait = torch.cuda.synchronize  # type: ignore[attr-defined]
        return call

    return {name: partial(synchronized, make) for name, make in found.items()}


def _said(error: Exception) -> str:
    return f"not measured: {type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _lasted(queues: dict[int, int], calls: Sequence[Any]) -> list[float]:
    """Microseconds of one call of each queue."""
    spent = []
    for call in calls:
        count = queues[id(call)]
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        _wait(call, result)
        spent.append(1e6 * (time.perf_counter() - start) / count)
    return spent


def _wait(call: Any, result: object) -> None:
    wait = getattr(call, "wait", None)
    if wait is None:
        jax.block_until_ready(result)
    else:
        wait()


def measured(case: Case, turns: int, notes: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each way that runs; what does not is noted."""
    calls: dict[str, Call] = {}
    queues: dict[int, int] = {}
    for name, make in case.make.items():
        try:
            call = make()
            for _ in range(2):  # the first compiles
                start = time.perf_counter()
                _wait(call, call())
            calls[name], queues[id(call)] = call, max(1, round(SHORTEST_QUEUE / (time.perf_counter() - start)))
        except Exception as error:  # what a chip, a version or a missing package refuses says nothing of the others
            notes.append(f"{case.name}, {name}: {_said(error)}")
    of_each = times_in_turn([[call] for call in calls.values()], turns, partial(_lasted, queues)) if calls else []
    times = dict(zip(calls, of_each, strict=True))
    for name, each in times.items():
        row: dict[str, Any] = {"case": case.name, "way": name, "us": each.as_dict()}
        if case.work:
            row["tflops"] = round(case.work / each.median / 1e6, 3)
        if PEER in times:
            row["speed_of_peer"] = round(times[PEER].median / each.median, 3)
        yield row


def rows_of(label: str, turns: int, ragged_dot: bool, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of one shape, each of them printed."""
    theirs: dict[str, Callable[[], Call]] = {}
    try:
        theirs = torch_ways(label)
    except Exception as error:
        notes.append(f"{PEER}: {_said(error)}")
    layer = Layer.drawn(*LINEAR[label])
    for case in (*products(layer, ragged_dot), *steps(layer), *quantizers(layer)):
        if case.name in theirs:
            case.make[PEER] = theirs[case.name]
        for row in measured(case, turns, notes):
            rate = f"{row['tflops']:8.1f} TFLOP/s" if "tflops" in row else " " * 16
            speed = row.get("speed_of_peer", "?")
            print(f"  {case.name:24} {row['way']:20} {row['us']['median']:10.1f} us {rate} {speed:>8} of {PEER}")
            yield {"shape": label, **row}
    if theirs:
        import torch

        theirs.clear()
        torch.cuda.empty_cache()


def main() -> None:
    """Prints a table and writes OUTPUT after every shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    parser.add_argument("--shape", choices=LINEAR, action="append", help="one of the layers; repeat for more")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--ragged-dot", action="store_true", help="XLA's own grouped product, too: 20 times as long")
    given = parser.parse_args()
    record: dict[str, Any] = {
        "command": f"python benchmarks/portable_jax.py FILE {given.commit}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine("cuda", "jax"),
        "versions": versions(),
        "commit": given.commit,
        "speed_of_peer": f"time of {PEER} over that of a way; above 1: the way is faster",
        "turns": given.turns,
    }
    record |= {"rows": (rows := []), "notes": (notes := [])}
    for label in given.shape or LINEAR:
        print(f"{label} {LINEAR[label]}", flush=True)
        of_shape: list[str] = []
        rows += rows_of(label, given.turns, given.ragged_dot, of_shape)
        notes += [f"{label}: {note}" for note in of_shape]
        given.output.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(notes))


if __name__ == "__main__":
    main()
