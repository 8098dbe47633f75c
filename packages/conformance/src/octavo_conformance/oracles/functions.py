"""Activations, their gradients and normalizations in float64, each with the largest error that fp32 may make of it.

Bounds, in units u = 2^-24, before the one rounding to the input's dtype (docs/numerics, fused forms):
- an activation or its derivative is within 4 ulp, 8 u of its value. Near a derivative's root, on [-4, -1/4], it is the
  absolute error that is small: 8 u of 1/4;
- each product after it adds u;
- sums over C elements of a row are within 4 sqrt(C) u, as fp32 sums of GEMMs are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo_conformance.problems.inputs import Array
from octavo_registry.contract.cards import GATED

U = 2.0**-24
_FUNCTION, _PRODUCT = 8 * U, U
_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)
_SMALLEST_NORMAL = 2.0**-126
"""What a device that flushes subnormals may lose."""

_erfc = np.vectorize(math.erfc, otypes=[np.float64])  # 1 + erf(x) would cancel for negative x


@dataclass(frozen=True, eq=False)
class Exact:
    """float64 values, and the error that fp32 arithmetic may make of each."""

    value: Array
    error: Array


def _one_plus_tanh(x: Array) -> Array:
    return np.asarray(2 / (1 + np.exp(-2 * x)))


def _cubic(x: Array, factor: float) -> Array:
    return _ROOT_2_OVER_PI * (x + factor * 0.044715 * x**3)


def _silu(x: Array) -> tuple[Array, Array]:
    s = 1 / (1 + np.exp(-x))
    return x * s, s * (1 + x / (1 + np.exp(x)))


def _gelu(x: Array) -> tuple[Array, Array]:
    below = 0.5 * _erfc(-x / math.sqrt(2))
    return x * below, below + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Array) -> tuple[Array, Array]:
    u = _cubic(x, 1)
    half = 0.5 * _one_plus_tanh(u)
    return x * half, half * (1 + _one_plus_tanh(-u) * _cubic(x, 3))


def _relu2(x: Array) -> tuple[Array, Array]:
    positive = np.maximum(x, 0)
    return positive * positive, 2 * positive


_PARTS: dict[str, Callable[[Array], tuple[Array, Array]]] = {
    "silu": _silu,
    "swiglu": _silu,
    "gelu": _gelu,
    "geglu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "geglu_tanh": _gelu_tanh,
    "relu2": _relu2,
}
"""Value and derivative of x, or of a gated activation's gate."""


def width(activation: str, features: int) -> int:
    """Columns of the activation's input where its result has `features`."""
    return 2 * features if activation in GATED else features


def activated(x: Array, activation: str, probs: Array | None) -> Exact:
    """act(x), or act(gate) * up, times probs [M], of x [M, C]."""
    wide = x.astype(np.float64)
    gate, up = np.split(wide, 2, axis=1) if activation in GATED else (wide, np.ones_like(wide))
    value = _PARTS[activation](gate)[0] * up
    if probs is not None:
        value = value * probs[:, None].astype(np.float64)
    return Exact(value, (_FUNCTION + 2 * _PRODUCT) * np.abs(value) + _SMALLEST_NORMAL * (1 + np.abs(up)))


def activated_gradient(dy: Array, x: Array, activation: str, probs: Array | None) -> Exact:
    """The gradient of x [M, C] from dy [M, F]."""
    wide, grad = x.astype(np.float64), dy.astype(np.float64)
    if probs is not None:
        grad = grad * probs[:, None].astype(np.float64)
    gated = activation in GATED
    gate, up = np.split(wide, 2, axis=1) if gated else (wide, np.ones_like(wide))
    value, slope = _PARTS[activation](gate)
    near_root = np.where((gate >= -4) & (gate <= -0.25), 0.25, 0)
    terms = np.abs(grad * up) * np.maximum(np.abs(slope), near_root)
    exact = grad * slope * up
    if gated:
        exact = np.concatenate([exact, grad * value], axis=1)
        terms = np.concatenate([terms, np.abs(grad * value)], axis=1)
        up, grad = np.tile(up, 2), np.tile(grad, 2)
    tiny = _SMALLEST_NORMAL * (1 + np.abs(grad)) * (1 + np.abs(up))
    return Exact(exact, (_FUNCTION + 3 * _PRODUCT) * terms + tiny)


@dataclass(frozen=True, eq=False)
class ExactNorm:
    """The normalized rows, and the statistics [M] of each row; the mean of RMSNorm is None."""

    y: Exact
    rstd: Exact
    mean: Exact | None


def normalized(x: Array, gamma: Array, beta: Array | None, norm: str, epsilon: float) -> ExactNorm:
    """(x - mean) rstd gamma + beta over the rows of x [M, C]."""
    wide, scale = x.astype(np.float64), gamma.astype(np.float64)
    shift = np.zeros_like(scale) if beta is None else beta.astype(np.float64)
    sums = 4 * math.sqrt(x.shape[1]) * U
    mean = wide.mean(axis=1, keepdims=True) if norm == "layer" else np.zeros((len(x), 1))
    mean_error = (sums + U) * np.abs(wide).mean(axis=1, keepdims=True) if norm == "layer" else np.zeros((len(x), 1))
    rstd = 1 / np.sqrt(((wide - mean) ** 2).mean(axis=1, keepdims=True) + float(np.float32(epsilon)))
    terms = (np.abs(wide) + np.abs(mean)) * rstd * np.abs(scale) + np.abs(shift)
    error = (_FUNCTION + sums) * terms + mean_error * rstd * np.abs(scale) + _SMALLEST_NORMAL
    value = (wide - mean) * rstd * scale + shift
    # a mean that is off by m moves the mean square by m^2 alone
    of_rstd = Exact(rstd[:, 0], ((_FUNCTION + sums) * rstd)[:, 0])
    of_mean = Exact(mean[:, 0], (mean_error + _FUNCTION * np.abs(mean))[:, 0]) if norm == "layer" else None
    return ExactNorm(Exact(value, error), of_rstd, of_mean)
