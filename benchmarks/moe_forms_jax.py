"""Forms of JAX's MoE layer beside permute, grouped_mlp and combine in a row, once with products of permuted rows, and
the layer with the choices' weights on the experts' results: residuals, XLA's temporaries and time.

python benchmarks/moe_forms_jax.py OUTPUT COMMIT

All ways of one shape and recipe take turns in one process, on a CUDA device. A step is one jitted program: the forward
and the backward pass of `routed_mlp` with the routing given. Its temporaries are what XLA's memory analysis says of the
compiled program; if XLA moved work that the backward pass is to do again back into the forward pass, they would not
fall from "keep_all" to "standard" to "recompute". "of rows" is a backend of the same kernels whose GEMMs take no
tokens: rows in high precision are permuted, and in block scaling codes are written once per choice. gpt-oss-20b's
layer has biases, and its own activation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from layers import MOE

import octavo
import octavo_jax
import octavo_registry
from octavo_bench.harness.timing import turn_order
from octavo_jax import moe
from octavo_jax_native.backend import NativeBackend
from octavo_jax_native.plugin import CARD
from octavo_registry.contract import (
    AnyBound,
    AnyRequest,
    Backend,
    BackendCard,
    BoundDgrad,
    BoundFprop,
    BoundWgrad,
    hookimpl,
)

GPT_OSS = "gpt-oss-20b"
SHAPES = {label: octavo_jax.MoeShape(*sizes) for label, sizes in MOE.items()} | {
    GPT_OSS: octavo_jax.MoeShape(8192, 4, 32, 2880, 2880)
}
RECIPES = {kind: octavo.recipe(kind) for kind in ("bf16", "fp8-block", "fp8-current", "mxfp8")} | {
    "fp8-block, wgrad in bf16": octavo.BlockScaling(wgrad="high_precision")
}
NATIVE, ROWS = "jax-native", "products-of-rows"
TURNS, WARM = 10, 2


class Way(NamedTuple):
    """How the layer runs; form None: the three operations in a row."""

    form: str | None
    weights_on: str = "activation"
    backend: str = NATIVE


WAYS = {
    "composed": Way(None),
    "standard": Way("standard"),
    "standard, of rows": Way("standard", backend=ROWS),
    "lean": Way("lean"),
    "recompute": Way("recompute"),
    "keep_all": Way("keep_all"),
    "on the output": Way("standard", "output"),
}


class OfRows(Backend):
    """jax-native, whose GEMMs take rows alone here."""

    def __init__(self) -> None:
        self._native = NativeBackend()

    def refuses(self, request: AnyRequest) -> str | None:
        """What jax-native refuses."""
        return self._native.refuses(request)

    def bind(self, request: AnyRequest) -> AnyBound:
        """jax-native's function, without tokens."""
        bound = self._native.bind(request)
        return replace(bound, takes_tokens=()) if isinstance(bound, BoundFprop | BoundDgrad | BoundWgrad) else bound


class Plugin:
    """The plugin of `OfRows`."""

    @hookimpl
    def octavo_backends(self) -> Iterable[BackendCard]:
        """jax-native's card, named and ranked behind it."""
        return (CARD.model_copy(update={"name": ROWS, "priority": CARD.priority - 1}),)

    @hookimpl
    def octavo_load(self, name: str) -> Backend | None:
        """The backend."""
        return OfRows() if name == ROWS else None


def draw(shape: octavo_jax.MoeShape) -> dict[str, Array]:
    """x, the choices' weights, their experts, wi and wo, and biases."""
    keys = jax.random.split(jax.random.key(1), 6)
    k, f, experts = shape.in_features, shape.hidden_features, shape.experts
    weights, choices = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[0], (shape.tokens, experts))), shape.k)
    return {
        "x": jax.random.normal(keys[1], (shape.tokens, k), jnp.bfloat16),
        "weights": weights,
        "choices": choices,
        "wi": jax.random.normal(keys[2], (experts, k, 2 * f), jnp.bfloat16) * jnp.bfloat16(k**-0.5),
        "wo": jax.random.normal(keys[3], (experts, f, k), jnp.bfloat16) * jnp.bfloat16(f**-0.5),
        "bi": jax.random.normal(keys[4], (experts, 2 * f), jnp.bfloat16),
        "bo": jax.random.normal(keys[5], (experts, k), jnp.bfloat16),
    }


def layer(recipe: octavo.Recipe, experts: int, way: Way, activation: str) -> Callable[..., Array]:
    """(x, weights, wi, wo, bi and bo or neither, choices) -> y."""
    how: dict[str, Any] = {"recipe": recipe, "backend": way.backend, "activation": activation}

    def call(x: Array, weights: Array, wi: Array, wo: Array, *others: Array) -> Array:
        *biases, choices = others
        named = {**how, **dict(zip(("bi", "bo"), biases, strict=False))}
        routing = moe.arrange(choices, weights, experts)
        if way.form is not None:
            y: Array = moe.routed_mlp(x, routing, wi, wo, form=way.form, weights_on=way.weights_on, **named)
            return y
        rows, probs = moe.permute(x, routing), moe.row_weights(routing)
        scales = probs if biases else None
        results = octavo_jax.grouped_mlp(rows, wi, wo, routing.group_sizes, probs=probs, bo_scales=scales, **named)
        return moe.combine(results, routing, weighted=False)

    return call


def rows_of(label: str, kind: str) -> list[dict[str, Any]]:
    """A row for each way of one shape and recipe."""
    shape, recipe = SHAPES[label], RECIPES[kind]
    given = draw(shape)
    biases, activation = (("bi", "bo"), "clamped_swiglu") if label == GPT_OSS else ((), "swiglu")
    leaves = tuple(given[name] for name in ("x", "weights", "wi", "wo", *biases))
    dy = jax.random.normal(jax.random.key(2), given["x"].shape, jnp.bfloat16)
    steps: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    results: dict[str, Any] = {}  # of the first way, by where the weights are
    for name, way in WAYS.items():
        call = layer(recipe, shape.experts, way, activation)

        def step(leaves: Any, choices: Array, dy: Array, call: Callable[..., Array] = call) -> Any:
            y, pull = jax.vjp(lambda *inner: call(*inner, choices), *leaves)
            return y, pull(dy)

        compiled = jax.jit(step).lower(leaves, given["choices"], dy).compile()
        memory = compiled.memory_analysis()
        steps[name] = lambda compiled=compiled: compiled(leaves, given["choices"], dy)
        result = jax.tree.leaves(steps[name]())
        expected = results.setdefault(way.weights_on, result)
        same = all(bool(jnp.array_equal(ours, theirs)) for ours, theirs in zip(result, expected, strict=True))
        rows[name] = {"temporary_bytes": memory.temp_size_in_bytes, "same_bits": same}
        if way.form is not None and way.backend == NATIVE:
            how: dict[str, Any] = {"weights_on": way.weights_on, "activation": activation}
            kept = octavo_jax.bytes_kept(recipe, shape, way.form, **how)  # type: ignore[arg-type]
            rows[name]["residual_bytes"] = kept.total
        del result, expected
    del results
    times = step_times(steps)
    return [{"shape": label, "recipe": kind, "way": name, **row, "step_ms": times[name]} for name, row in rows.items()]


def step_times(steps: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians in milliseconds of steps that take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(TURNS):
        for name in (list(steps)[at] for at in turn_order(len(steps), turn)):
            run = steps[name]
            jax.block_until_ready(run())
            start = time.perf_counter()
            for _ in range(3):
                result = run()
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - start) / 3 * 1e3)
            del result
    return {name: statistics.median(taken[WARM:]) for name, taken in times.items()}


def write(script: str, description: str | None, cases: Iterable[Callable[[], list[dict[str, Any]]]]) -> None:
    """Runs the cases of a script, and writes its OUTPUT after each of them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        "command": f"python benchmarks/{script} moe.json {arguments.commit}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"gpu": jax.devices()[0].device_kind},
        "versions": {"jax": jax.__version__, "octavo-jax": octavo_jax.__version__},
        "commit": arguments.commit,
        "shapes": {label: vars(shape) for label, shape in SHAPES.items()},
        "rows": [],
    }
    for rows in cases:
        record["rows"] += rows()
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    """Writes OUTPUT after every recipe."""
    octavo_registry.register(Plugin(), "products-of-rows-plugin")
    write("moe_forms_jax.py", __doc__, [partial(rows_of, label, kind) for label in SHAPES for kind in RECIPES])


if __name__ == "__main__":
    main()
