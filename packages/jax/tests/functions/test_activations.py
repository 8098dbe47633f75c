"""Activations and normalizations as functions: within fp32's bound of float64, differentiable, refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import octavo_jax
import octavo_numerics
from octavo_jax.functions.activations import ACTIVATIONS, activate
from octavo_jax.functions.norms import normalize
from octavo_registry import GATED

M, F = 64, 96
U = 2.0**-24
FUNCTION = 8 * U
"""docs/numerics: an activation is within 4 ulp of float64 before it is rounded; a product after it adds half an ulp."""

FLUSHED = 2.0**-116
"""XLA:CPU flushes subnormals; a factor of up to 2^10 may come after."""


def _rounded(exact: np.ndarray, like: Any) -> np.ndarray:
    """Half an ulp of the result's dtype."""
    info = ml_dtypes.finfo(like.dtype)
    return np.maximum(np.abs(exact) * float(info.eps), float(info.smallest_subnormal)) / 2


def test_second_derivatives_are_refused() -> None:
    """Of an activation, of its probabilities and of an MLP: JAX's own ones leave out what the formulas correct."""
    x, kernels, probs = jnp.ones((4, 8)), jnp.ones((1, 8, 8)), jnp.ones(4)

    def mlp(x: Any, probs: Any) -> Any:
        how: dict[str, Any] = {"probs": probs, "activation": "gelu", "recipe": None, "backend": "jax-reference"}
        return octavo_jax.grouped_mlp(x, kernels, kernels, [4], **how)

    for function in (lambda x, probs: activate(x, "gelu", probs=probs), mlp):
        for argument in (0, 1):
            slope = jax.grad(lambda *given, f=function: jnp.sum(f(*given) ** 2), argument)
            with pytest.raises(TypeError, match=r"activation of octavo was differentiated.*differentiate once"):
                jax.grad(lambda x, slope=slope: jnp.sum(slope(x, probs)))(x)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_and_its_gradients(activation: Any, rng: np.random.Generator) -> None:
    """y, dx and dprobs of bf16 rows with probabilities; rows of zeros and of large values among them."""
    gated = activation in GATED
    x = (rng.standard_normal((M, 2 * F if gated else F)) * rng.choice([0, 1, 8], (M, 1))).astype(jnp.bfloat16)
    dy, probs = rng.standard_normal((M, F)).astype(jnp.bfloat16), rng.random(M).astype(np.float32)

    @jax.jit
    def run(x: Any, probs: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda x, probs: activate(x, activation, probs=probs), x, probs)
        return y, *pull(dy)

    y, dx, dprobs = (np.asarray(a) for a in run(x, probs, dy))
    wide, grad, p = x.astype(np.float64), dy.astype(np.float64), probs.astype(np.float64)[:, None]
    value, slope, up, passes = octavo_numerics.activation_parts(x, activation)
    gate, sums = wide[:, :F], FUNCTION + (3 * U if activation == "clamped_swiglu" else 2 * U)
    exact = value * up * p
    assert np.all(np.abs(y - exact) <= _rounded(exact, y) * 1.01 + sums * np.abs(exact) + FLUSHED)
    near_root = np.where((gate >= -4) & (gate <= -0.25), 0.25, 0)
    dgate, terms = grad * p * slope * up, np.abs(grad * p * up) * np.maximum(np.abs(slope), near_root)
    expected = np.concatenate([dgate, grad * p * value * passes], 1) if gated else dgate
    terms = np.concatenate([terms, np.abs(grad * p * value * passes)], 1) if gated else terms
    assert np.all(np.abs(dx - expected) <= _rounded(expected, dx) * 1.01 + (sums + U) * terms + FLUSHED)
    products = grad * value * up
    assert np.all(np.abs(dprobs - products.sum(1)) <= (F * U + sums) * np.abs(products).sum(1) + FLUSHED)
    assert (y.dtype, dx.dtype, dprobs.dtype) == (jnp.bfloat16, jnp.bfloat16, np.float32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_limits(activation: Any) -> None:
    """Infinities give the limits of the function, NaN gives NaN; zero's sign is kept where the function keeps it."""
    x = jnp.asarray([np.inf, -np.inf, np.nan, 0.0, 1e30, -1e30], jnp.float32)
    rows = jnp.stack([x, jnp.ones_like(x)], 1) if activation in GATED else x[:, None]
    y = np.asarray(activate(rows, activation))[:, 0]
    assert np.isnan(y[2])
    np.testing.assert_array_equal(y[[1, 3, 5]], 0)
    if activation == "clamped_swiglu":
        assert y[0] == y[4] == np.asarray(activate(jnp.asarray([[7.0, 1.0]]), activation))[0, 0]
        return
    assert np.isposinf(y[0])
    assert y[4] == (np.inf if activation == "relu2" else np.float32(1e30))


def test_at_the_clamp() -> None:
    """The subgradient of torch's clamp, which is what models were trained with: 1 at a limit, 0 past it."""
    x = np.array([[7, 7], [7, -7], [7.0625, 7.0625], [1, -7.0625], [np.inf, -np.inf]], np.float32)
    ones = np.ones((len(x), 1), np.float32)
    dx = np.asarray(jax.vjp(lambda x: activate(x, "clamped_swiglu"), jnp.asarray(x))[1](jnp.asarray(ones))[0])
    expected = octavo_numerics.activate_gradient(ones, x, "clamped_swiglu")
    np.testing.assert_array_equal(dx == 0, expected == 0)
    assert np.all(np.abs(dx - expected) <= (FUNCTION + 4 * U) * np.abs(expected))
    assert (dx[:2] != 0).all()
    assert (dx[2] == 0).all()


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_normalization_and_its_gradients(norm: Any, rng: np.random.Generator) -> None:
    """y, dx, dgamma and dbeta of fp32 rows [2, M, F] whose mean is not small, against float64."""
    x = (rng.standard_normal((2, M, F)) + 3).astype(np.float32)
    gamma, beta = (rng.standard_normal(F).astype(np.float32) for _ in range(2))
    dy = rng.standard_normal(x.shape).astype(np.float32)
    shift = beta if norm == "layer" else None

    @jax.jit
    def run(x: Any, gamma: Any, beta: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda *a: normalize(*a, norm=norm, epsilon=1e-3), x, gamma, beta)
        return y, *pull(dy)

    y, dx, dgamma, dbeta = run(x, gamma, shift, dy)
    wide, grad = x.astype(np.float64), dy.astype(np.float64)
    mean = wide.mean(-1, keepdims=True) if norm == "layer" else 0.0
    rstd = 1 / np.sqrt(((wide - mean) ** 2).mean(-1, keepdims=True) + float(np.float32(1e-3)))
    normal = (wide - mean) * rstd
    g = grad * gamma
    center = g.mean(-1, keepdims=True) if norm == "layer" else 0.0
    expected = rstd * (g - center - normal * (g * normal).mean(-1, keepdims=True))
    # an fp32 sum over n elements is within 4 sqrt(n) u of its terms (docs/numerics); x - mean has terms |x| and |mean|
    rows, features = FUNCTION + 4 * math.sqrt(2 * M) * U, FUNCTION + 4 * math.sqrt(F) * U
    size = (np.abs(wide) + np.abs(mean)) * rstd
    terms = np.abs(g) + np.abs(g).mean(-1, keepdims=True) + size * (np.abs(g) * size).mean(-1, keepdims=True)
    assert np.all(np.abs(y - (normal * gamma + (beta if norm == "layer" else 0))) <= features * (size * 5 + 5))
    assert np.all(np.abs(dx - expected) <= 4 * features * rstd * terms)
    bound = (rows + features) * (np.abs(grad) * size).sum((0, 1))
    assert np.all(np.abs(dgamma - (grad * normal).sum((0, 1))) <= 2 * bound)
    if norm == "layer":
        assert np.all(np.abs(dbeta - grad.sum((0, 1))) <= rows * np.abs(grad).sum((0, 1)))
    else:
        assert dbeta is None


X = jnp.ones((8, 32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: activate(X, "tanh"), "activation is 'tanh'; give one of silu, "),  # type: ignore[arg-type]
        (lambda: activate(X[:, :31], "swiglu"), "x has 31 columns; swiglu needs 2 F"),
        (lambda: activate(X, "silu", probs=jnp.ones(7)), r"probs has shape \[7\] .* \[8\]"),
        (lambda: normalize(X, jnp.ones(8)), r"gamma has shape \[8\] .* needs \[32\]"),
        (lambda: normalize(X, jnp.ones(32), jnp.ones(32)), "beta was given and norm is 'rms'"),
        (lambda: normalize(X, jnp.ones(32), epsilon=0.0), "epsilon is 0.0"),
        (lambda: normalize(X, jnp.ones(32), norm="batch"), "norm is 'batch'"),  # type: ignore[arg-type]
        (lambda: normalize(X, jnp.ones(32), epsilon="1e-6"), "epsilon is '1e-6'"),  # type: ignore[arg-type]
        (lambda: jax.jit(lambda e: normalize(X, jnp.ones(32), epsilon=e))(1e-6), "epsilon is .*make it static"),
        (lambda: activate(X.astype(jnp.int32), "silu"), "x has dtype int32; it must be bfloat16"),
        (lambda: activate(X.astype(jnp.float8_e5m2), "gelu"), "x has dtype float8_e5m2"),
        (lambda: normalize(*(a.astype(jnp.int8) for a in (X, X[0]))), "x has dtype int8; it must be bfloat16"),
        (lambda: activate(jnp.ones(()), "silu"), "x has no axis"),
        (lambda: normalize(jnp.ones(()), jnp.ones(())), "x has no axis"),
    ],
)
def test_arguments_are_refused_by_name(call: Callable[[], Any], message: str) -> None:
    """With what was given and what is needed."""
    with pytest.raises(ValueError, match=message):
        call()
