"""Activations between a MoE layer's products.

GELU is arXiv 1606.08415, the gated units are arXiv 2002.05202, squared ReLU is arXiv 2109.08668, and the clamped SwiGLU
is that of gpt-oss (arXiv 2508.10925), with the gradients that torch's clamp has up to torch 2.14: 1 at a limit, 0 past
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from octavo.errors import one_of

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh", "clamped_swiglu"]
F64 = NDArray[np.float64]

_GATED = frozenset({"swiglu", "geglu", "geglu_tanh", "clamped_swiglu"})
_ALPHA = 1.702  # of clamped_swiglu's sigmoid, which makes of silu an approximation of GELU
_LIMIT = 7.0
_CUBIC = 0.044715
_FAR = 1000.0  # where a sigmoid and a Gaussian are 0 or 1 in float64

_erfc = np.vectorize(math.erfc, otypes=[np.float64])  # 1 + erf(x) would cancel for negative x


class ActivationParts(NamedTuple):
    """What an activation of rows [M, C] is made of, each float64 [M, F].

    value, slope   act(gate) and its derivative; without a gate act(x)
    factor         what multiplies it: the up projection, clamped and plus one in clamped_swiglu; 1 without a gate
    passes         the derivative of `factor` in the up projection, 1 or 0; 0 without a gate
    """

    value: F64
    slope: F64
    factor: F64
    passes: F64


# Infinities give the limit: a factor of at most _FAR in magnitude is multiplied with what is 0 there.


def _logistic(x: F64, v: F64, inner: F64) -> tuple[F64, F64]:
    """x sigmoid(v(x)) and its derivative; `inner` is x v'(x)."""
    with np.errstate(over="ignore"):
        s, rest = 1 / (1 + np.exp(-v)), 1 / (1 + np.exp(v))
    return np.maximum(x, -_FAR) * s, s * (1 + inner * rest)


def _silu(x: F64, alpha: float = 1.0) -> tuple[F64, F64]:
    v = alpha * np.clip(x, -_FAR, _FAR)
    return _logistic(x, v, v)


def _gelu(x: F64) -> tuple[F64, F64]:
    near, below = np.clip(x, -_FAR, _FAR), 0.5 * _erfc(-x / math.sqrt(2))
    slope = below + near * np.exp(-near * near / 2) / math.sqrt(2 * math.pi)
    return np.maximum(x, -_FAR) * below, slope


def _gelu_tanh(x: F64) -> tuple[F64, F64]:
    # (1 + tanh(u)) / 2 is the sigmoid of 2 u
    near, factor = np.clip(x, -_FAR, _FAR), 2 * math.sqrt(2 / math.pi)
    return _logistic(x, factor * (near + _CUBIC * near**3), factor * (near + 3 * _CUBIC * near**3))


def _relu2(x: F64) -> tuple[F64, F64]:
    positive = np.maximum(x, 0)
    return positive * positive, 2 * positive


def _clamped(x: F64) -> tuple[F64, F64]:
    value, slope = _silu(np.minimum(x, _LIMIT), _ALPHA)
    return value, np.where(x > _LIMIT, 0, slope)


_FUNCTIONS: dict[Activation, Callable[[F64], tuple[F64, F64]]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
    "swiglu": _silu,
    "geglu": _gelu,
    "geglu_tanh": _gelu_tanh,
    "clamped_swiglu": _clamped,
}
"""Value and derivative of x, or of a gated activation's gate."""


def activation_parts(x: NDArray[Any], activation: Activation) -> ActivationParts:
    """The parts of `activation` of x [M, C]: [M, F] where it has no gate, else [M, 2 F] with the gates first.

    ValueError for an unknown name, or an odd number of columns of a gated one.
    """
    one_of("activation", activation, get_args(Activation))
    wide = x.astype(np.float64)
    if activation not in _GATED:
        value, slope = _FUNCTIONS[activation](wide)
        return ActivationParts(value, slope, np.ones_like(wide), np.zeros_like(wide))
    if x.shape[-1] % 2:
        raise ValueError(f"x has {x.shape[-1]} columns and {activation} reads gates and an up projection; give 2 F")
    gate, up = np.split(wide, 2, axis=-1)
    value, slope = _FUNCTIONS[activation](gate)
    if activation != "clamped_swiglu":
        return ActivationParts(value, slope, up, np.ones_like(up))
    passes = np.where(np.abs(up) > _LIMIT, 0.0, 1.0)
    return ActivationParts(value, slope, np.clip(up, -_LIMIT, _LIMIT) + 1, passes)


def activate(x: NDArray[Any], activation: Activation, probs: NDArray[Any] | None = None) -> F64:
    """act(x), or of x = [gate, up] act(gate) up, in float64: [M, F] of x [M, C]; probs [M] multiply the rows.

    clamped_swiglu is g sigmoid(1.702 g) (u + 1), with g = min(gate, 7) and u = up clamped to [-7, 7]. Raises as
    `activation_parts` does.
    """
    parts = activation_parts(x, activation)
    value = parts.value * parts.factor
    return value if probs is None else value * probs[:, None].astype(np.float64)


def activate_gradient(
    dy: NDArray[Any], x: NDArray[Any], activation: Activation, probs: NDArray[Any] | None = None
) -> F64:
    """The gradient of x [M, C] from dy [M, F], what `activate` returned, in float64. Raises as `activation_parts`.

    That of an up projection past its clamp is 0, whatever dy and the gate are.
    """
    parts, grad = activation_parts(x, activation), dy.astype(np.float64)
    if probs is not None:
        grad = grad * probs[:, None].astype(np.float64)
    gradient = grad * parts.slope * parts.factor
    if activation not in _GATED:
        return gradient
    return np.concatenate([gradient, np.where(parts.passes > 0, grad * parts.value, 0.0)], axis=-1)
