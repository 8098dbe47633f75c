"""Forms of JAX's MoE layer beside permute, grouped_mlp and combine in a row: residuals, XLA's temporaries and time.

python benchmarks/moe_forms_jax.py OUTPUT COMMIT

All ways of one shape and recipe take turns in one process, on a CUDA device. A step is one jitted program: the forward
and the backward pass of `routed_mlp` with the routing given. Its temporaries are what XLA's memory analysis says of the
compiled program; if XLA moved work that the backward pass is to do again back into the forward pass, they would not
fall from "keep_all" to "standard" to "recompute".
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from layers import MOE

import octavo
import octavo_jax
from octavo_jax import moe

SHAPES = {label: octavo_jax.MoeShape(*MOE[label]) for label in ("Qwen3-30B", "DSv3, 32 of 256 experts")}
KINDS = ("bf16", "fp8-block", "fp8-current", "mxfp8")
FORMS = ("standard", "lean", "recompute", "keep_all")
TURNS, WARM = 10, 2


def draw(shape: octavo_jax.MoeShape) -> dict[str, Array]:
    """x, the choices' weights, their experts, wi and wo."""
    keys = jax.random.split(jax.random.key(1), 4)
    k, f, experts = shape.in_features, shape.hidden_features, shape.experts
    weights, choices = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[0], (shape.tokens, experts))), shape.k)
    return {
        "x": jax.random.normal(keys[1], (shape.tokens, k), jnp.bfloat16),
        "weights": weights,
        "choices": choices,
        "wi": jax.random.normal(keys[2], (experts, k, 2 * f), jnp.bfloat16) * jnp.bfloat16(k**-0.5),
        "wo": jax.random.normal(keys[3], (experts, f, k), jnp.bfloat16) * jnp.bfloat16(f**-0.5),
    }


def layer(recipe: octavo.Recipe, experts: int, form: str | None) -> Callable[..., Array]:
    """(x, weights, wi, wo, choices) -> y; form None: the three operations in a row."""

    def call(x: Array, weights: Array, wi: Array, wo: Array, choices: Array) -> Array:
        routing = moe.arrange(choices, weights, experts)
        if form is not None:
            y: Array = moe.routed_mlp(x, routing, wi, wo, recipe=recipe, form=form)
            return y
        rows = moe.permute(x, routing)
        return moe.combine(octavo_jax.grouped_mlp(rows, wi, wo, routing.group_sizes, recipe=recipe), routing)

    return call


def rows_of(label: str, kind: str) -> list[dict[str, Any]]:
    """A row for each way of one shape and recipe."""
    shape, recipe = SHAPES[label], octavo.recipe(kind)
    given = draw(shape)
    leaves = tuple(given[name] for name in ("x", "weights", "wi", "wo"))
    dy = jax.random.normal(jax.random.key(2), given["x"].shape, jnp.bfloat16)
    steps: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    expected: Any = None
    for form in (None, *FORMS):
        name = form or "composed"
        call = layer(recipe, shape.experts, form)

        def step(leaves: Any, choices: Array, dy: Array, call: Callable[..., Array] = call) -> Any:
            y, pull = jax.vjp(lambda *inner: call(*inner, choices), *leaves)
            return y, pull(dy)

        compiled = jax.jit(step).lower(leaves, given["choices"], dy).compile()
        memory = compiled.memory_analysis()
        steps[name] = lambda compiled=compiled: compiled(leaves, given["choices"], dy)
        result = jax.tree.leaves(steps[name]())
        expected = expected or result
        same = all(bool(jnp.array_equal(ours, theirs)) for ours, theirs in zip(result, expected, strict=True))
        rows[name] = {"temporary_bytes": memory.temp_size_in_bytes, "same_bits": same}
        if form is not None:
            kept = octavo_jax.bytes_kept(recipe, shape, form)  # type: ignore[arg-type]
            rows[name]["residual_bytes"] = kept.total
        del result
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(TURNS):
        for name, run in steps.items():
            jax.block_until_ready(run())
            start = time.perf_counter()
            for _ in range(3):
                result = run()
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - start) / 3 * 1e3)
            del result
    return [
        {"shape": label, "recipe": kind, "way": name, **row, "step_ms": statistics.median(times[name][WARM:])}
        for name, row in rows.items()
    ]


def main() -> None:
    """Writes OUTPUT after every recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        "command": f"python benchmarks/moe_forms_jax.py moe.json {arguments.commit}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {"gpu": jax.devices()[0].device_kind},
        "versions": {"jax": jax.__version__, "octavo-jax": octavo_jax.__version__},
        "commit": arguments.commit,
        "shapes": {label: vars(shape) for label, shape in SHAPES.items()},
        "rows": [],
    }
    for label in SHAPES:
        for kind in KINDS:
            record["rows"] += rows_of(label, kind)
            arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
