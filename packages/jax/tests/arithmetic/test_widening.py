"""bf16 and fp16 become fp32 by their bits: XLA, which may leave out two conversions, cannot see through these."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
from octavo_jax.arithmetic.widening import in_fp32
from octavo_jax.optimizers import AdamW

CONVERTED = re.compile(r"stablehlo\.convert .*tensor<(?:[\dx]*x)?b?f16>\) -> tensor<(?:[\dx]*x)?f32>")
M, K, F, G = 24, 16, 8, 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_value_is_exact(dtype: str) -> None:
    """Subnormals, infinities and both zeros, too; a NaN stays one."""
    x = jnp.arange(1 << 16, dtype=jnp.uint16).view(dtype)
    wide, exact = np.asarray(in_fp32(x)), np.asarray(x).astype(np.float32)
    assert np.array_equal(np.isnan(wide), np.isnan(exact))
    assert np.array_equal(wide.view(np.uint32)[~np.isnan(wide)], exact.view(np.uint32)[~np.isnan(exact)])


def test_it_has_the_derivative_of_a_conversion(rng: np.random.Generator) -> None:
    """Bits have none, and JAX would return zeros without a word."""
    x, factor = (jnp.asarray(rng.standard_normal(M), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    for transform in (jax.grad, jax.jacfwd):
        one, other = (
            transform(lambda x: jnp.sum(widen(x) * factor))(x)  # noqa: B023
            for widen in (in_fp32, lambda x: x.astype(jnp.float32))
        )
        assert np.array_equal(one, other)
        assert np.any(np.asarray(one))


def _converted(function: Any, *arguments: Any) -> list[str]:
    """The conversions of bf16 or fp16 to fp32 in what a call and its gradients lower to."""

    def whole(*arguments: Any) -> Any:
        y, pull = jax.vjp(function, *arguments)
        return y, pull(y)

    return CONVERTED.findall(jax.jit(whole).lower(*arguments).as_text())


@pytest.mark.parametrize("recipe", ["bf16", "fp8-row-wgrad-high-precision"])
def test_no_program_converts_what_it_reads(recipe: str) -> None:
    """On a GPU XLA gave products and activations the values from before a caller's rounding to bf16, where both were in
    one program: y in bf16 was off by 2^-9 of its operands, and differed from the same call outside of jit."""
    ones = lambda *shape: jnp.ones(shape, jnp.bfloat16)  # noqa: E731
    x, wi, wo, sizes = ones(M, K), ones(G, K, 2 * F), ones(G, F, K), jnp.array([10, 9])
    options: Any = {"recipe": octavo.recipe(recipe), "backend": "jax-reference"}
    scales = jnp.ones(M)

    def mlp(x: Any, wi: Any, wo: Any, bi: Any, bo: Any, scales: Any) -> Any:
        return octavo_jax.grouped_mlp(x, wi, wo, sizes, bi=bi, bo=bo, probs=scales, bo_scales=scales, **options)

    def normalized(x: Any, gamma: Any, beta: Any, wi: Any, wo: Any) -> Any:
        return octavo_jax.layernorm_mlp(x, gamma, wi, wo, beta, norm="layer", **options)

    assert CONVERTED.search(jax.jit(lambda x: x.astype(jnp.float32)).lower(x).as_text())
    assert not _converted(mlp, x, wi, wo, ones(G, 2 * F), ones(G, K), scales)
    assert not _converted(normalized, x, ones(K), ones(K), wi[0], wo[0])


def test_an_optimizer_reads_rounded_gradients() -> None:
    """A gradient that was rounded to bf16 in the same program."""
    optimizer, parameter = AdamW(1e-3), jnp.ones((M, K))
    state = optimizer.init(parameter)
    text = jax.jit(optimizer.step).lower(parameter.astype(jnp.bfloat16), state, parameter).as_text()
    assert not CONVERTED.search(text)
