"""A router's logits and their gradients: products in fp32, which are made by tensor cores where tokens are bf16."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
from octavo_jax import moe
from octavo_jax.dispatch.device import DeviceKind
from octavo_jax.moe.router import logits
from octavo_numerics import error_bound

T, K, E = 70, 144, 13
PAIRS = 6
"""Of parts of dy and of the router, which dx adds up."""


def _complaint(made: Any, left: Any, right: Any, k: int) -> str:
    """What octavo_numerics has against `made`, which is left right^T in sums of k products at most."""
    bound = error_bound(octavo.HighPrecision(), k, out_dtype=made.dtype.name)
    sides = (np.pad(np.asarray(side, np.float64), ((0, 0), (0, k - side.shape[1]))) for side in (left, right))
    report = bound.check(np.asarray(made, np.float64), *sides, zero_mean=False)
    return "" if report.passed else str(report)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_by_parts_are_those_of_fp32(dtype: str, rng: np.random.Generator) -> None:
    """Three parts of 8 bits hold all 24 of an fp32 value, whatever XLA makes of conversions there and back; what is
    kept for the gradients is the tokens and the router, and no copy in fp32."""
    x = jnp.asarray(rng.standard_normal((T, K)), jnp.bfloat16)
    router = jnp.asarray(rng.standard_normal((K, E)), dtype)
    dy = jnp.asarray(rng.standard_normal((T, E)) * np.exp(4 * rng.standard_normal((T, E))), jnp.float32)

    @jax.jit
    def both(x: Any, router: Any, dy: Any) -> Any:
        made, pull = jax.vjp(logits.logits_by_parts, x, router)
        return made, pull(dy), jax.tree.leaves(pull)

    made, (dx, drouter), kept = both(x, router, dy)
    assert {(leaf.shape, leaf.dtype) for leaf in kept} == {(x.shape, x.dtype), (router.shape, router.dtype)}
    assert not _complaint(made, x, router.T, K)
    assert not _complaint(dx, dy, router, PAIRS * E)
    assert not _complaint(drouter, x.T, dy.T, T)


def test_derivatives_of_the_gradients(rng: np.random.Generator) -> None:
    """A penalty on gradients: through parts, each cotangent was one of bf16 with 8 bits of fp32's 24."""
    x, v = (jnp.asarray(rng.standard_normal((T, K)), jnp.bfloat16) for _ in range(2))
    router = jnp.asarray(rng.standard_normal((K, E)), jnp.float32)
    dy = jnp.asarray(rng.standard_normal((T, E)), jnp.float32)

    @jax.jit
    def of_dx(router: Any, dy: Any) -> Any:
        _, pull = jax.vjp(lambda router, dy: jax.vjp(logits.logits_by_parts, x, router)[1](dy)[0], router, dy)
        return pull(v)

    ddrouter, ddy = of_dx(router, dy)
    assert not _complaint(ddrouter, v.T, dy.T, T)
    assert not _complaint(ddy, v, router.T, K)


@pytest.mark.parametrize("transform", [jax.jvp, jax.hessian])
def test_forward_mode_is_refused_with_a_name(transform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's own sentence names no function, and where a router's product is a custom_vjp function it comes first."""
    monkeypatch.setattr(logits, "device_of", lambda x: DeviceKind("cuda", (9, 0)))
    x, router = jnp.ones((T, 16), jnp.bfloat16), jnp.ones((16, E))

    def loss(router: Any) -> Any:
        return jnp.sum(jnp.sin(logits.router_logits(x, router)))

    with pytest.raises(TypeError, match="moe_mlp was given to forward-mode"):
        transform(loss, (router,), (router,)) if transform is jax.jvp else transform(loss)(router)


def test_an_infinite_weight_has_infinite_logits(rng: np.random.Generator) -> None:
    """Infinity has no second part that would make it NaN."""
    router = jnp.asarray(rng.standard_normal((K, E)), jnp.float32).at[:, 3].set(jnp.inf)
    made = np.asarray(logits.logits_by_parts(jnp.ones((2, K), jnp.bfloat16), router))
    assert (made[:, 3] == np.inf).all()
    assert np.isfinite(np.delete(made, 3, 1)).all()


@pytest.mark.parametrize(
    ("dtype", "asked", "parts"),
    [("bfloat16", None, True), ("float32", None, True), ("float32", "tensorfloat32", False)],
)
def test_on_a_gpu_the_products_are_of_bf16(
    dtype: str, asked: str | None, parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fp32 they took 1.2 ms of DeepSeek-V3's layer, and of TF32 they are off; whoever asks for that gets it."""
    monkeypatch.setattr(logits, "device_of", lambda x: DeviceKind("cuda", (9, 0)))
    x, router = jnp.zeros((T, 16), jnp.bfloat16), jnp.zeros((16, E), dtype)
    experts = {"wi": jnp.zeros((E, 16, 32), jnp.bfloat16), "wo": jnp.zeros((E, 16, 24), jnp.bfloat16)}

    def loss(x: Any, router: Any) -> Any:
        return jnp.sum(moe.moe_mlp(x, router, **experts, k=2, recipe=None)[0])

    multiplied: list[Any] = []
    sums = logits._sums

    def watched(left: Any, right: list[Any], *axes: int) -> Any:
        multiplied.extend((left.dtype, *(one.dtype for one in right)))
        return sums(left, right, *axes)

    monkeypatch.setattr(logits, "_sums", watched)
    with jax.default_matmul_precision(asked):
        jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, router)
    assert set(multiplied) == ({jnp.dtype("bfloat16")} if parts else set())
