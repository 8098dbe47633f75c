"""The groups' amax that a quantizer makes on its way, and what delayed scaling makes of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import octavo_jax
import octavo_registry
from octavo import DelayedScaling, QuantizerSpec
from octavo_jax.policies import save_quantized
from octavo_registry import Request

BACKEND = "jax-native"
M, K, N, G = 64, 32, 48, 3
RECIPE = DelayedScaling(history=4)
SIZES = np.array([20, 0, 30], np.int32)


def test_the_quantizers_amax(
    one_per_scaling: QuantizerSpec, rng: Any, arguments_for: Any, same_bits: Any, same_tensor: Any, as_definition: Any
) -> None:
    """max |x| of each group beside the same codes; NaN where a group holds one, 0 where it is empty, nothing of the
    NaN tail; of stacked matrices likewise."""
    spec = one_per_scaling
    x = rng.standard_normal((M, K)).astype(np.float32)
    x[22, 3], x[50:] = np.nan, np.nan
    request = Request("quantize", "jax", "cpu", "float32", "float32", quantizer=spec)
    plan = octavo_registry.plan(request, backend=BACKEND)
    assert plan.bound.with_amax is not None
    given = arguments_for(spec, rng, G)
    q, amax = plan.bound.with_amax(jnp.asarray(x), jnp.asarray(SIZES), **given)
    same_bits(amax[:2], np.array([np.abs(x[:20]).max(), 0], np.float32), "amax")
    assert np.isnan(amax[2])
    same_tensor(q, as_definition(plan.run(jnp.asarray(x), jnp.asarray(SIZES), **given)))
    if not spec.hadamard:
        w = rng.standard_normal((G, N, K)).astype(np.float32)
        same_bits(plan.bound.with_amax(jnp.asarray(w), **given)[1], np.abs(w).max((1, 2)), "amax of matrices")


def _gradients(policy: Any) -> Any:
    def layer(x: Array, stacked: Any) -> tuple[Array, Any]:
        kernel, state = stacked
        y, recorded = octavo_jax.grouped_dense(x, kernel, SIZES, recipe=RECIPE, state=state, backend=BACKEND)
        return jnp.tanh(y), recorded

    body = layer if policy == "no remat" else jax.checkpoint(layer, policy=policy)

    def loss(x: Array, kernels: Array, states: Any) -> Array:
        return jnp.sum(jax.lax.scan(body, x, (kernels, states))[0])

    return jax.value_and_grad(loss, (0, 1, 2))


@pytest.mark.parametrize("policy", [None, save_quantized()], ids=["nothing saved", "saved"])
def test_an_amax_is_never_computed_again(policy: Any, rng: Any, equations: Any, same_bits: Any) -> None:
    """Three layers in a scan: with the planes saved the backward pass runs no quantizer of x and of the kernel for the
    amaxes' sake, and reads neither once more; the state's gradient has the same bits either way (faults.md 42, 43)."""
    x = jnp.asarray(rng.standard_normal((M, K)), jnp.float32)
    kernels = jnp.asarray(rng.standard_normal((3, G, K, K)) / 5, jnp.float32)
    states = jax.tree.map(lambda a: jnp.stack([a] * 3), octavo_jax.init_delayed(RECIPE, G))
    gradients = _gradients(policy)
    program = jax.make_jaxpr(gradients)(x, kernels, states).jaxpr
    assert equations(program, "octavo_native_quantize") == (9 if policy is not None else 15)
    assert equations(program, "octavo_never_recomputed") == 9
    plain = jax.jit(_gradients("no remat"))(x, kernels, states)
    for mine, wanted in zip(
        jax.tree.leaves(jax.jit(gradients)(x, kernels, states)), jax.tree.leaves(plain), strict=True
    ):
        same_bits(mine, wanted, "under jax.checkpoint")
    rows = np.split(np.abs(np.asarray(x)), np.cumsum(SIZES))[:G]
    assert np.array_equal(plain[1][2].x.history[0, 0], [row.max(initial=0) for row in rows])


def test_no_operand_is_read_for_its_amax_alone() -> None:
    """In a training step nothing but quantizers and GEMMs reads x, and nothing else dy: no reduction of a matrix."""
    x, kernel = jnp.ones((M, K), jnp.bfloat16), jnp.ones((G, K, N), jnp.bfloat16)
    state = octavo_jax.init_delayed(RECIPE, G)

    def loss(x: Array, kernel: Array, state: Any) -> Array:
        y, _ = octavo_jax.grouped_dense(x, kernel, jnp.asarray(SIZES), recipe=RECIPE, state=state, backend=BACKEND)
        return jnp.sum(y[0])

    text = str(jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, kernel, state).as_text())
    reductions = [line for line in text.splitlines() if "stablehlo.reduce(" in line and "maximum" in line]
    assert not [line for line in reductions if f"{M}x" in line or f"{G}x{K}x{N}" in line]
    assert text.count("amax") >= 3
