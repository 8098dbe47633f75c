"""JAX's own grouped GEMM: `jax.lax.ragged_dot` in bf16, all three GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from octavo.recipe_base import Gemm
from octavo_bench.harness.timing import Call


def ragged_dot_call(operands: dict[str, Array], sizes: Sequence[int], gemm: Gemm) -> Call:
    """One GEMM of x [M, K], w [G, N, K] and dy [M, N], compiled."""
    x, w, dy = operands["x"], operands["w"], operands["dy"]
    rows = jnp.asarray(sizes, jnp.int32)
    if gemm == "fprop":
        forward = jax.jit(lambda x, w, rows: jax.lax.ragged_dot(x, w.swapaxes(1, 2), rows))
        return lambda: forward(x, w, rows)
    if gemm == "dgrad":
        backward = jax.jit(lambda dy, w, rows: jax.lax.ragged_dot(dy, w, rows))
        return lambda: backward(dy, w, rows)

    def weights(x: Any, w: Any, dy: Any, rows: Any) -> Any:
        return jax.vjp(lambda matrices: jax.lax.ragged_dot(x, matrices.swapaxes(1, 2), rows), w)[1](dy)[0]

    gradient = jax.jit(weights)
    return lambda: gradient(x, w, dy, rows)
