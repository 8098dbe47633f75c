"""What the tests of the MoE block over a mesh share: a small block, a step of it, and ragged_all_to_all for CPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import octavo
from octavo_jax import moe

T, K, F, N, E, CHOICES = 32, 64, 32, 64, 8, 2
SHAPES = {"x": (T, K), "router": (K, E), "wi": (E, K, 2 * F), "wo": (E, F, N), "bi": (E, 2 * F), "bo": (E, N)}
BALANCE = 0.5
BACKEND = "jax-reference" if jax.default_backend() == "cpu" else None

Arrays = dict[str, Any]


SUMS = 64 * 2.0**-24
"""Of the largest result, how far float32 results with sums in another order may be apart, addends not far above it.

64 roundings of 2^-24: what a result's chain of products adds up, at most 64 terms a sum, differs by 4 sqrt(64) = 32 of
them in two orders (`octavo_numerics.error_bound`, T1), and two such sums stand in a row.
"""


def assert_sums_agree(actual: Any, wanted: Any, what: str = "") -> None:
    """Equal but for the order of float32 sums: within `SUMS`."""
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    assert actual.shape == wanted.shape, what
    assert np.abs(actual - wanted).max() <= SUMS * np.abs(wanted).max(), what


def block_arrays(rng: np.random.Generator, dtype: Any = jnp.float32) -> Arrays:
    """Arguments of the block, and dy, by name."""
    made = {name: rng.standard_normal(shape) * shape[-2] ** -0.5 for name, shape in SHAPES.items()}
    return {name: jnp.asarray(one, dtype) for name, one in {**made, "dy": rng.standard_normal((T, N))}.items()}


def step(a: Arrays, *, recipe: octavo.Recipe | None, **options: Any) -> Any:
    """(y, stats), gradients by name, of sum(y * dy) and the balance loss; jit and shard as you like."""
    given = {name: one for name, one in a.items() if name != "dy"}

    def loss(given: Arrays) -> Any:
        y, stats, *_ = moe.moe_mlp(**given, k=CHOICES, recipe=recipe, backend=BACKEND, **options)
        return jnp.sum(y * a["dy"]) + BALANCE * stats.balance_loss, (y, stats)

    gradients, made = jax.grad(loss, has_aux=True)(given)
    return made, gradients


def emulated(
    x: Array, output: Array, starts: Array, sizes: Array, landings: Array, received: Array, *, axis_name: Any
) -> Array:
    """`jax.lax.ragged_all_to_all` of gathered arrays, as JAX defines it; where sizes contradict, nothing but NaN."""
    rows, starts, sizes, landings = (lax.all_gather(one, axis_name) for one in (x, starts, sizes, landings))
    devices, me = len(rows), lax.axis_index(axis_name)
    local, index = len(received) // devices, jnp.arange(len(output))
    for slot in range(len(received)):
        source, mine = slot // local, me * local + slot % local
        start, size, landing = starts[source, mine], sizes[source, mine], landings[source, mine]
        inside = ((index >= landing) & (index < landing + size)).reshape(-1, *(1,) * (x.ndim - 1))
        moved = rows[source][jnp.clip(index - landing + start, 0, len(x) - 1)]
        output = jnp.where(inside, moved, output)
        wrong = jnp.full_like(output, jnp.nan if jnp.issubdtype(output.dtype, jnp.floating) else 255)
        output = jnp.where(received[slot] == size, output, wrong)
    return output
