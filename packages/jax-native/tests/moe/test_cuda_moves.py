"""On a Hopper GPU: a block whose router, order and sums are the kernels' is its parts, and near JAX's operations."""

from __future__ import annotations

from functools import partial
from typing import Any

import hopper_gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import octavo
import octavo_jax
from octavo_jax import moe

pytestmark = hopper_gpu.MARKS

T, E, K, C, F = 512, 16, 4, 256, 128


def _block(x: Any, router: Any, wi: Any, wo: Any, **how: Any) -> Any:
    return moe.moe_mlp(x, router, wi, wo, k=K, recipe=octavo.HighPrecision(), **how)[0]


def _parts(x: Any, router: Any, wi: Any, wo: Any, weights_on: str) -> Any:
    routing = moe.route(jnp.matmul(x, router, preferred_element_type=jnp.float32), K)
    probs = None if weights_on == "output" else moe.row_weights(routing)
    rows = moe.permute(x, routing)
    rows = octavo_jax.grouped_mlp(rows, wi, wo, routing.group_sizes, recipe=octavo.HighPrecision(), probs=probs)
    return moe.combine(rows, routing, weighted=probs is None)


def _step(call: Any, *arrays: Any) -> Any:
    y, pull = jax.vjp(call, *arrays)
    return y, pull(y)


@pytest.mark.parametrize("weights_on", ["output", "activation"])
def test_a_block_is_its_parts(weights_on: Any, rng: np.random.Generator) -> None:
    """y bit for bit, a second time, too; y and gradients as JAX's operations make them, but for a few roundings."""
    shapes = ((T, C), (C, E), (E, C, 2 * F), (E, F, C))
    arrays = [hopper_gpu.on_gpu(jnp.asarray(rng.standard_normal(shape) / 8, jnp.bfloat16)) for shape in shapes]
    mesh = jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,), devices=jax.devices("gpu")[:1])
    with jax.set_mesh(mesh):
        step = jax.jit(partial(_step, partial(_block, weights_on=weights_on)))
        text = step.lower(*arrays).as_text()
        made, again = step(*arrays), step(*arrays)
        parts = jax.jit(partial(_parts, weights_on=weights_on))(*arrays)
        wanted = jax.jit(partial(_step, partial(_block, weights_on=weights_on, backend="jax-reference")))(*arrays)
    for target in ("octavo_choose", "octavo_choose_gradient", "octavo_route", "octavo_combine_rows"):
        assert f"@{target}(" in text
    np.testing.assert_array_equal(made[0], parts)
    for one, other, reference in zip(*map(jax.tree.leaves, (made, again, wanted)), strict=True):
        np.testing.assert_array_equal(one, other)
        near, far = np.asarray(one, np.float32), np.asarray(reference, np.float32)
        assert np.linalg.norm(near - far) <= 2.0**-6 * np.linalg.norm(far)
