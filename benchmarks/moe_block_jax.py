"""JAX's whole MoE block beside the same block in which XLA does all that is neither a GEMM nor a quantizer.

python benchmarks/moe_block_jax.py OUTPUT COMMIT

Both ways of one shape, recipe and place of the choices' weights take turns in one process, on a CUDA device. A step is
one jitted program: `moe_mlp` with its router, forward and backward. "of XLA" is a backend of the same kernels that
serves no router, sorts no choices, moves no rows, and makes an activation or its gradient beside codes alone, without
the gradient of the probabilities.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from moe_forms_jax import GPT_OSS, RECIPES, SHAPES, draw, step_times, write

import octavo_registry
from octavo_jax import moe
from octavo_jax_native.backend import NativeBackend
from octavo_jax_native.plugin import CARD
from octavo_registry.contract import (
    AnyBound,
    AnyRequest,
    Backend,
    BackendCard,
    BoundActQuantize,
    BoundDactQuantize,
    ChooseRequest,
    MoveRequest,
    hookimpl,
)

NATIVE, XLA = "jax-native", "products-and-quantizers"
WAYS = {"native": NATIVE, "of XLA": XLA}


class Products(Backend):
    """jax-native's GEMMs and quantizers."""

    def __init__(self) -> None:
        self._native = NativeBackend()

    def refuses(self, request: AnyRequest) -> str | None:
        """What jax-native refuses, and what has to do with rows."""
        if isinstance(request, MoveRequest | ChooseRequest):
            return "leaves rows and routers to XLA here"
        return self._native.refuses(request)

    def bind(self, request: AnyRequest) -> AnyBound:
        """jax-native's function, without values alone."""
        bound = self._native.bind(request)
        if isinstance(bound, BoundActQuantize):
            return replace(bound, values=None)
        if isinstance(bound, BoundDactQuantize):
            return replace(bound, run=partial(_without_dprobs, bound.run), values=None)
        return bound


def _without_dprobs(run: Callable[..., Any], *arrays: Any, **how: Any) -> Any:
    codes, extras = run(*arrays, **how)
    return codes, extras._replace(dprobs=None)


class Plugin:
    """The plugin of `Products`."""

    @hookimpl
    def octavo_backends(self) -> Iterable[BackendCard]:
        """jax-native's card, named and ranked behind it."""
        return (CARD.model_copy(update={"name": XLA, "priority": CARD.priority - 1}),)

    @hookimpl
    def octavo_load(self, name: str) -> Backend | None:
        """The backend."""
        return Products() if name == XLA else None


def block(label: str, kind: str, weights_on: Any, backend: str) -> Callable[..., Array]:
    """(x, router, wi, wo, bi and bo or neither) -> y."""
    how: dict[str, Any] = {"k": SHAPES[label].k, "recipe": RECIPES[kind], "weights_on": weights_on}
    how |= {"backend": backend, "activation": "clamped_swiglu" if label == GPT_OSS else "swiglu"}

    def call(x: Array, router: Array, wi: Array, wo: Array, *biases: Array) -> Array:
        y: Array = moe.moe_mlp(x, router, wi, wo, **how, **dict(zip(("bi", "bo"), biases, strict=False)))[0]
        return y

    return call


def distance(ours: Any, theirs: Any) -> float:
    """The largest relative difference of y and the gradients, in the L2 norm: activations and sums round apart."""

    def of(one: Array, other: Array) -> float:
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        return float(jnp.linalg.norm(one - other) / jnp.linalg.norm(other))

    return max(map(of, jax.tree.leaves(ours), jax.tree.leaves(theirs)))


def rows_of(label: str, kind: str, weights_on: str) -> list[dict[str, Any]]:
    """A row for each way."""
    given, shape = draw(SHAPES[label]), SHAPES[label]
    biases = ("bi", "bo") if label == GPT_OSS else ()
    router = jax.random.normal(jax.random.key(5), (shape.in_features, shape.experts), jnp.bfloat16)
    router = router * jnp.bfloat16(shape.in_features**-0.5)
    leaves = (given["x"], router, given["wi"], given["wo"], *(given[name] for name in biases))
    dy = jax.random.normal(jax.random.key(2), given["x"].shape, jnp.bfloat16)
    steps: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, backend in WAYS.items():
        call = block(label, kind, weights_on, backend)

        def step(leaves: Any, dy: Array, call: Callable[..., Array] = call) -> Any:
            y, pull = jax.vjp(call, *leaves)
            return y, pull(dy)

        compiled = jax.jit(step).lower(leaves, dy).compile()
        rows[name] = {"temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}
        steps[name] = lambda compiled=compiled: compiled(leaves, dy)
    rows["native"]["distance"] = distance(steps["native"](), steps["of XLA"]())
    medians = step_times(steps)
    rows["native"]["share"] = medians["native"] / medians["of XLA"]
    named = {"shape": label, "recipe": kind, "weights_on": weights_on}
    return [{**named, "way": name, **row, "step_ms": medians[name]} for name, row in rows.items()]


def main() -> None:
    """Writes OUTPUT after every case."""
    octavo_registry.register(Plugin(), "products-and-quantizers-plugin")
    cases = itertools.product(SHAPES, RECIPES, ("output", "activation"))
    write("moe_block_jax.py", __doc__, [partial(rows_of, *case) for case in cases])


if __name__ == "__main__":
    main()
