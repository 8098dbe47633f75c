"""A layer under JAX's transformations: the bits that it has alone, whatever calls the kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax

M, K, N, G = 48, 32, 32, 3
SIZES = np.array([17, 0, 20], np.int32)
every_kind = pytest.mark.parametrize("kind", ["bf16", "fp8-current", "fp8-block"])


def _layer(x: Any, kernel: Any, sizes: Any, kind: str, backend: str) -> Any:
    return octavo_jax.grouped_dense(x, kernel, sizes, recipe=octavo.recipe(kind), backend=backend)


def _step(x: Any, kernel: Any, sizes: Any, dy: Any, kind: str, backend: str) -> tuple[Any, ...]:
    y, pull = jax.vjp(lambda x, kernel: _layer(x, kernel, sizes, kind, backend), x, kernel)
    return (y, *pull(dy))


def _arrays(rng: np.random.Generator, *lead: int) -> list[Any]:
    """x with a NaN tail, kernel, dy with one."""
    x, kernel, dy = (rng.standard_normal((*lead, *side)).astype(np.float32) for side in ((M, K), (G, K, N), (M, N)))
    x[..., SIZES.sum() :, :] = np.nan
    dy[..., SIZES.sum() :, :] = np.nan
    return [jnp.asarray(one, jnp.bfloat16) for one in (x, kernel, dy)]


def _same(made: Any, expected: Any) -> None:
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@every_kind
def test_one_program_serves_all_sizes(kind: str, rng: np.random.Generator, backend: str) -> None:
    """Sizes are never read back: a second vector of sizes compiles nothing and has its own result."""
    (x, kernel, dy), traces = _arrays(rng), []

    @jax.jit
    def step(x: Any, kernel: Any, sizes: Any, dy: Any) -> tuple[Any, ...]:
        traces.append(1)
        return _step(x, kernel, sizes, dy, kind, backend)

    for sizes in (SIZES, np.array([0, 37, 0], np.int32)):
        _same(step(x, kernel, jnp.asarray(sizes), dy), _step(x, kernel, jnp.asarray(sizes), dy, kind, backend))
    assert len(traces) == 1


@every_kind
def test_vmap_is_a_loop(kind: str, rng: np.random.Generator, backend: str) -> None:
    """An ensemble of layers: each has the bits of its own call."""
    x, kernel, dy = _arrays(rng, 2)
    sizes = jnp.asarray(np.stack([SIZES, [0, 26, 0]]))
    many = jax.vmap(partial(_step, kind=kind, backend=backend))(x, kernel, sizes, dy)
    for i in range(2):
        _same([one[i] for one in many], _step(x[i], kernel[i], sizes[i], dy[i], kind, backend))


@every_kind
def test_scanned_layers_are_computed_again(kind: str, rng: np.random.Generator, backend: str) -> None:
    """Under jax.checkpoint in a scan, which takes no kernel that writes into an array it was given."""
    x, kernel, _ = _arrays(rng)
    kernels = jnp.stack([kernel, kernel[::-1], -kernel])

    def loss(x: Any, kernels: Any, again: bool) -> Any:
        def body(h: Any, kernel: Any) -> tuple[Any, None]:
            return jnp.tanh(_layer(h, kernel, jnp.asarray(SIZES), kind, backend)), None

        body = jax.checkpoint(body) if again else body
        return jnp.sum(jax.lax.scan(body, x, kernels)[0].astype(jnp.float32))

    gradients = [jax.jit(jax.grad(partial(loss, again=again), argnums=(0, 1)))(x, kernels) for again in (True, False)]
    _same(*gradients)


@pytest.mark.parametrize("checked", [True, False])
def test_shards_are_layers_of_their_own(checked: bool, rng: np.random.Generator, backend: str) -> None:
    """Inside shard_map with check_vma on and off: tokens and sizes of each shard, one kernel for all, whose gradient
    is their sum."""
    shards = min(2, jax.device_count())
    x, kernel, dy = _arrays(rng, shards)
    kernel, sizes = kernel[0], jnp.asarray(np.stack([SIZES, SIZES[::-1]])[:shards])
    mesh = jax.make_mesh((shards,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:shards])

    def local(x: Any, kernel: Any, sizes: Any, dy: Any) -> tuple[Any, ...]:
        y, dx, dw = _step(x[0], kernel, sizes[0], dy[0], "fp8-block", backend)
        return y[None], dx[None], dw[None] if not checked else dw

    data = P("d")
    outs = (data, data, P() if checked else data)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(data, P(), data, data), out_specs=outs, check_vma=checked)
    y, dx, dw = jax.jit(mapped)(x, kernel, sizes, dy)
    alone = [_step(x[i], kernel, sizes[i], dy[i], "fp8-block", backend) for i in range(shards)]
    _same(y, [one[0] for one in alone])
    _same(dx, [one[1] for one in alone])
    if not checked:
        _same(dw, [one[2] for one in alone])
    else:
        total = sum(np.asarray(one[2], np.float32) for one in alone)
        _same([dw], [jnp.asarray(total, jnp.bfloat16)])  # as XLA adds bf16: in fp32, and rounded
