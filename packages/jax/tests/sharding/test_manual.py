"""Layers on the local arrays of a fully manual `jax.shard_map`, with JAX's check of types and without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax

M, K, N, G = 12, 32, 16, 2
MESH = {"ep": 2, "dp": 4}
SIZES = np.array([[5, 3], [0, 12], [7, 0], [1, 1], [0, 0], [2, 9], [12, 0], [4, 4]], np.int32)
TOKENS, EXPERTS = P(("ep", "dp")), P("ep")
BACKEND = "jax-reference"
SLOW = pytest.mark.slow


def _layer(x: Any, kernel: Any, sizes: Any, recipe: octavo.Recipe) -> Any:
    seed = 3 if recipe.stochastic else None
    return octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, seed=seed, backend=BACKEND)


def _step(layer: Callable[..., Any], x: Any, kernel: Any, sizes: Any, dy: Any) -> tuple[Any, ...]:
    y, pull = jax.vjp(lambda x, kernel: layer(x, kernel, sizes), x, kernel)
    return (y, *pull(dy))


def _arrays(rng: np.random.Generator, experts: int, data: int) -> list[Any]:
    """x and dy of that many shards with NaN tails, and kernels of the experts' shards."""
    sizes = SIZES[: experts * data]
    x, dy = (rng.standard_normal((experts * data, M, columns)).astype(np.float32) for columns in (K, N))
    for shard, total in enumerate(sizes.sum(axis=1)):
        x[shard, total:] = dy[shard, total:] = np.nan
    kernel = rng.standard_normal((experts * G, K, N)).astype(np.float32)
    return [jnp.asarray(one) for one in (x, kernel, sizes, dy)]


@pytest.mark.parametrize(
    ("recipe", "check_vma"),
    [
        ("mxfp8", True),
        ("bf16", False),
        *(pytest.param(name, True, marks=SLOW) for name in ("fp8-current", "fp8-block", "nvfp4", "bf16")),
        *(pytest.param(name, False, marks=SLOW) for name in ("mxfp8", "fp8-current", "fp8-row", "nvfp4")),
    ],
)
def test_local_arrays(recipe: str, check_vma: bool, mesh_of: Any, rng: np.random.Generator) -> None:
    """Result and gradients are one device's bits, shard by shard, and the kernel's, which data shards share, is summed
    once. JAX's default, check_vma=True, types every array and wants a kernel's gradient typed as the kernel is."""
    layer = partial(_layer, recipe=octavo.recipe(recipe))
    mesh = mesh_of(**MESH)
    E, D = mesh.axis_sizes
    specs = (TOKENS, EXPERTS, TOKENS)
    sharded = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=TOKENS, check_vma=check_vma)
    x, kernel, sizes, dy = _arrays(rng, E, D)
    rows = (x.reshape(-1, K), kernel, sizes.reshape(-1), dy.reshape(-1, N))
    y, dx, dw = jax.jit(partial(_step, sharded))(*rows)
    alone = jax.jit(partial(_step, layer))
    for expert, kernels in enumerate(jnp.split(kernel, E)):
        shards = range(expert * D, expert * D + D)
        parts = [alone(x[i], kernels, sizes[i], dy[i]) for i in shards]
        np.testing.assert_array_equal(y.reshape(E * D, M, N)[shards.start : shards.stop], [part[0] for part in parts])
        np.testing.assert_array_equal(dx.reshape(E * D, M, K)[shards.start : shards.stop], [part[1] for part in parts])
        each = np.asarray([part[2] for part in parts], np.float64)
        # fp32 sums of D shards, in an order of XLA's own
        atol = D * 2.0**-23 * np.abs(each).sum(axis=0)
        assert (np.abs(dw[expert * G : expert * G + G] - each.sum(axis=0)) <= atol).all()


def test_local_arrays_without_rows(mesh_of: Any) -> None:
    """Shards of no token are typed as other shards are: what has no elements differs from shard to shard, too. Nothing
    reaches the kernel and the bias, which all shards share."""

    def local(x: Any, kernel: Any, bias: Any) -> Any:
        how: dict[str, Any] = {"recipe": "mxfp8", "backend": BACKEND}
        return octavo_jax.grouped_dense(x, kernel, jnp.zeros(G, jnp.int32), bias=bias, **how)

    over = jax.shard_map(local, mesh=mesh_of(dp=4), in_specs=(P("dp"), P(), P()), out_specs=P("dp"))
    given = jnp.ones((0, K)), jnp.ones((G, K, N)), jnp.ones((G, N))
    gradients = jax.jit(jax.grad(lambda *given: jnp.sum(over(*given)), argnums=(0, 1, 2)))(*given)
    for gradient, array in zip(gradients, given, strict=True):
        assert np.array_equal(gradient, jnp.zeros_like(array))


def test_shared_delayed_state(mesh_of: Any, rng: np.random.Generator) -> None:
    """A state that data shards share, differentiated inside or outside: its amaxes are the largest of theirs, where
    JAX would add up a derivative."""
    recipe = octavo.recipe("fp8-delayed")
    mesh = mesh_of(**MESH)
    E, D = mesh.axis_sizes
    state = octavo_jax.init_delayed(recipe, E * G)
    x, kernel, sizes, dy = _arrays(rng, E, D)

    def loss(x: Any, kernel: Any, sizes: Any, dy: Any, state: Any) -> Any:
        y, _ = octavo_jax.grouped_dense(x, kernel, sizes, recipe=recipe, state=state, backend=BACKEND)
        return jnp.where(dy == dy, y * dy, 0).sum()

    history = octavo_jax.ScalingHistory(P(None, "ep"), P("ep"))
    states = octavo_jax.DelayedState(history, history, history)
    rows = (x.reshape(-1, K), kernel, sizes.reshape(-1), dy.reshape(-1, N))
    specs = (TOKENS, EXPERTS, TOKENS, TOKENS, states)

    def total(*arrays: Any) -> Any:
        return jax.lax.psum(loss(*arrays), ("ep", "dp"))

    inside = jax.shard_map(jax.grad(loss, argnums=4), mesh=mesh, in_specs=specs, out_specs=states)
    outside = jax.grad(jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=P()), argnums=4)
    after = jax.jit(lambda *arrays: (inside(*arrays), outside(*arrays)))(*rows, state)

    def largest(tokens: Any, columns: int) -> Any:
        ends = np.cumsum(sizes, axis=1)
        amax = np.zeros((E, G), np.float32)
        for shard, block in enumerate(np.asarray(tokens).reshape(E * D, M, columns)):
            for group, end in enumerate(ends[shard]):
                rows = np.abs(block[end - sizes[shard, group] : end])
                amax[shard // D, group] = max(amax[shard // D, group], rows.max(initial=0))
        return amax.reshape(-1)

    for found in after:
        np.testing.assert_array_equal(found.x.history[0], largest(x, K))
        np.testing.assert_array_equal(found.grad.history[0], largest(dy, N))
        np.testing.assert_array_equal(found.kernel.history[0], np.abs(kernel).max(axis=(1, 2)))
        np.testing.assert_array_equal(found.x.history[1:], state.x.history[1:])


def _fused(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A layer of x, and what it has of parameters: shapes, shared by all shards."""
    how: dict[str, Any] = {"recipe": octavo.recipe("fp8-current"), "backend": BACKEND}
    if name == "layernorm_dense":
        return partial(octavo_jax.layernorm_dense, **how), {"kernel": (K, N), "gamma": (K,), "bias": (N,)}
    if name == "layernorm_mlp":
        shapes = {"gamma": (K,), "wi": (K, 2 * N), "wo": (N, K), "bi": (2 * N,), "bo": (K,)}
        return partial(octavo_jax.layernorm_mlp, **how), shapes
    sizes = SIZES[0]
    shapes = {"wi": (G, K, 2 * N), "wo": (G, N, K), "bi": (G, 2 * N), "bo": (G, K)}
    return lambda x, **parameters: octavo_jax.grouped_mlp(x, group_sizes=sizes, **parameters, **how), shapes


@pytest.mark.parametrize(
    "name", ["layernorm_dense", *(pytest.param(name, marks=SLOW) for name in ("grouped_mlp", "layernorm_mlp"))]
)
def test_fused_layers(name: str, mesh_of: Any, rng: np.random.Generator) -> None:
    """With parameters that all shards share and differentiated inside, as a data-parallel step does: each gradient is
    the sum over shards."""
    layer, shapes = _fused(name)
    parameters = {key: jnp.asarray(rng.standard_normal(shape), jnp.float32) for key, shape in shapes.items()}
    mesh = mesh_of(dp=4)
    D = mesh.size
    x = jnp.asarray(rng.standard_normal((D, M, K)), jnp.float32)

    def gradients(x: Any, parameters: Any) -> Any:
        return jax.grad(lambda x, parameters: jnp.sin(layer(x, **parameters)).sum(), argnums=(0, 1))(x, parameters)

    whole = jax.shard_map(gradients, mesh=mesh, in_specs=(P("dp"), P()), out_specs=(P("dp"), P()))
    dx, found = jax.jit(whole)(x.reshape(-1, K), parameters)
    alone = jax.jit(gradients)
    parts = [alone(one, parameters) for one in x]
    np.testing.assert_array_equal(dx.reshape(x.shape), [part[0] for part in parts])
    for key, gradient in found.items():
        each = np.asarray([part[1][key] for part in parts], np.float64)
        # fp32 sums of D shards, in an order of XLA's own
        assert (np.abs(gradient - each.sum(axis=0)) <= D * 2.0**-23 * np.abs(each).sum(axis=0)).all(), key


def test_partial_sums_are_added_up_once(mesh_of: Any, rng: np.random.Generator) -> None:
    """y of a kernel whose K the caller's own axis cuts, with its bias: of small integers, whose sums are exact."""
    x, kernel, bias = (jnp.asarray(rng.integers(-4, 5, shape), jnp.float32) for shape in ((M, K), (2, K, 32), (2, 32)))

    def layer(x: Any, kernel: Any, bias: Any, **how: Any) -> Any:
        return octavo_jax.grouped_dense(x, kernel, [M - 3, 2], bias=bias, recipe=None, backend=BACKEND, **how)

    spread = jax.shard_map(
        partial(layer, sharding=octavo_jax.MeshAxes(tp="tp", tp_dim="K")),
        mesh=mesh_of(tp=2),
        in_specs=(P(None, "tp"), P(None, "tp", None), P()),
        out_specs=P(),
    )
    np.testing.assert_array_equal(jax.jit(spread)(x, kernel, bias), layer(x, kernel, bias))


@pytest.mark.slow
@pytest.mark.parametrize(("check_vma", "inside"), [(True, False), (True, True), (False, False)])
def test_roles_of_manual_axes(check_vma: bool, inside: bool, mesh_of: Any, rng: np.random.Generator) -> None:
    """An MLP told what the caller's own axes do: shards of kernels are gathered, their gradients scattered over fsdp,
    partial sums over tp added up once, whoever differentiates where."""
    mesh = mesh_of(fsdp=2, tp=2)
    recipe, axes, data = octavo.recipe("fp8-row"), octavo_jax.MeshAxes(fsdp="fsdp", tp="tp"), mesh.shape["fsdp"]
    how: dict[str, Any] = {"recipe": recipe, "activation": "gelu", "backend": BACKEND}
    shapes = {"wi": (1, K, 2 * K), "wo": (1, 2 * K, K), "bi": (1, 2 * K), "bo": (1, K)}
    lie = {"wi": P(None, "fsdp", "tp"), "wo": P(None, "tp", "fsdp"), "bi": P(None, "tp"), "bo": P()}
    parameters = {key: jnp.asarray(rng.standard_normal(shape) / 6, jnp.float32) for key, shape in shapes.items()}
    x, dy = (jnp.asarray(rng.standard_normal((data, M, K)), jnp.float32) for _ in range(2))

    def step(layer: Callable[..., Any], x: Any, dy: Any, parameters: Any) -> tuple[Any, ...]:
        y, pull = jax.vjp(layer, x, parameters)
        return (y, *pull(dy))

    def local(x: Any, parameters: Any) -> Any:
        return octavo_jax.grouped_mlp(x[0], group_sizes=[M - 1], sharding=axes, **parameters, **how)[None]

    over = partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    tokens = P("fsdp")
    if inside:
        whole = over(partial(step, local), in_specs=(tokens, tokens, lie), out_specs=(tokens, tokens, lie))
    else:
        whole = partial(step, over(local, in_specs=(tokens, lie), out_specs=tokens))
    y, dx, found = jax.jit(whole)(x, dy, parameters)

    def one(x: Any, parameters: Any) -> Any:
        return octavo_jax.grouped_mlp(x, group_sizes=[M - 1], **parameters, **how)

    parts = [jax.jit(partial(step, one))(x[i], dy[i], parameters) for i in range(data)]
    for actual, each in ((y, [part[0] for part in parts]), (dx, [part[1] for part in parts])):
        # fp32 sums over tp in another order
        assert np.abs(actual - np.asarray(each)).max() <= 2 * K * 2.0**-23 * np.abs(each).max()
    for key, gradient in found.items():
        each = np.asarray([part[2][key] for part in parts], np.float64)
        assert (np.abs(gradient - each.sum(axis=0)) <= K * 2.0**-23 * np.abs(each).sum(axis=0).max()).all(), key
