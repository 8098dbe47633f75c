"""JAX's own grouped GEMM: `jax.lax.ragged_dot` in bf16, all three GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from octavo.recipe_base import Gemm
from octavo_bench.harness.timing import Call


def ragged_dot_call(operands: dict[str, Array], sizes: Sequence[int], gemm: Gemm) -> Call:
    """One GEMM of x [M, K], w [G, N, K] and dy [M, N]; compiled once for all calls of one shape."""
    x, w, dy = operands["x"], operands["w"], operands["dy"]
    return partial(_GEMMS[gemm], x, w, dy, jnp.asarray(sizes, jnp.int32))


@jax.jit
def _fprop(x: Array, w: Array, dy: Array, rows: Array) -> Array:
    return jax.lax.ragged_dot(x, w.swapaxes(1, 2), rows)


@jax.jit
def _dgrad(x: Array, w: Array, dy: Array, rows: Array) -> Array:
    return jax.lax.ragged_dot(dy, w, rows)


@jax.jit
def _wgrad(x: Array, w: Array, dy: Array, rows: Array) -> Array:
    gradient: Array = jax.vjp(lambda matrices: jax.lax.ragged_dot(x, matrices.swapaxes(1, 2), rows), w)[1](dy)[0]
    return gradient


_GEMMS = {"fprop": _fprop, "dgrad": _dgrad, "wgrad": _wgrad}
