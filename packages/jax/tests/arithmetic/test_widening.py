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
import octavo_registry
from octavo_jax.arithmetic.widening import in_fp32
from octavo_jax.moe.router.logits import router_logits
from octavo_jax.optimizers import AdamW
from octavo_registry import GemmRequest

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


def test_products_in_fp32_read_rounded_operands() -> None:
    """bf16 rows beside kernels in fp32, and a block whose `dtype` is fp32: what is cast for a product is read, too."""
    narrow, wide = (lambda *shape, dtype=dtype: jnp.ones(shape, dtype) for dtype in (jnp.bfloat16, jnp.float32))
    x, dims = narrow(M, K), ((G, K, 2 * F), (G, F, K))

    def mlp(x: Any, wi: Any, wo: Any) -> Any:
        recipe = octavo.recipe("fp8-row-wgrad-high-precision")
        return octavo_jax.grouped_mlp(x, wi, wo, jnp.array([10, 9]), recipe=recipe, backend="jax-reference")

    def block(x: Any, router: Any, wi: Any, wo: Any) -> Any:
        options: Any = {"recipe": "fp8-block", "backend": "jax-reference", "dtype": jnp.float32}
        return octavo_jax.moe.moe_mlp(x, router, wi, wo, k=1, **options)[0]

    assert not _converted(mlp, x, *(wide(*shape) for shape in dims))
    assert not _converted(block, x, wide(K, G), *(narrow(*shape) for shape in dims))


@pytest.mark.parametrize("master_dtype", ["float32", "bfloat16"])
def test_an_optimizer_reads_rounded_values(master_dtype: str) -> None:
    """Gradients and parameters that were rounded to bf16 in the same program, its own new ones among them: an update
    was the new parameter's master minus the old parameter, and the sum of the two not always the new parameter."""
    optimizer, parameter = AdamW(1e-3, master_dtype=master_dtype), jnp.ones((M, K), jnp.bfloat16)
    state = optimizer.init(parameter)

    def steps(grad: Any, state: Any, parameter: Any) -> Any:
        update, _ = optimizer.transformation().update(grad, state, parameter)
        return update, optimizer.step(grad, state, parameter), optimizer.init(parameter)

    assert not CONVERTED.search(jax.jit(steps).lower(parameter, state, parameter).as_text())


def test_a_router_reads_rounded_logits() -> None:
    """And a product in fp32 rounded tokens."""
    logits, bias, tokens = (jnp.ones(shape, jnp.bfloat16) for shape in ((M, F), F, (M, K)))

    def weights(logits: Any, bias: Any, score: Any) -> Any:
        return octavo_jax.choose_experts(logits, 1, score=score, bias=bias, backend="jax-reference").weights

    def losses(logits: Any, score: Any) -> Any:
        return octavo_jax.router_losses(logits, jnp.zeros((M, 1), jnp.int32), score=score)

    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        assert not _converted(lambda logits, bias: weights(logits, bias, score), logits, bias)  # noqa: B023
        assert not _converted(lambda logits: losses(logits, score), logits)  # noqa: B023
    assert not _converted(router_logits, tokens, jnp.ones((K, F)))


def test_an_accumulator_is_read_as_it_was_rounded() -> None:
    """Of a weight gradient that is added to what another product of the program has left in bf16."""
    bfloat16 = {"in_dtype": "bfloat16", "out_dtype": "bfloat16"}
    request = GemmRequest(op="wgrad", framework="jax", device="cpu", recipe=octavo.HighPrecision(), **bfloat16)
    wgrad = octavo_registry.plan(request, backend="jax-reference").run
    x, dy, out = (jnp.ones(shape, jnp.bfloat16) for shape in ((M, K), (M, F), (G, F, K)))
    text = jax.jit(lambda *a: wgrad(*a[:3], out=a[3], accumulate=True)).lower(x, dy, jnp.array([10, 9]), out).as_text()
    assert not CONVERTED.search(text)
