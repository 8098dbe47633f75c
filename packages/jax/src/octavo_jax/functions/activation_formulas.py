"""Activations and their derivatives in fp32, within 4 ulp of float64 where the result is normal.

Near a derivative's root, on [-4, -1/4], it is the absolute error that is small: 2 units of 2^-24. A product after it
(gate times up, times the row's probability) adds half an ulp. Infinities give the limit, NaN gives NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo_jax.arithmetic.widening import in_fp32
from octavo_jax.functions.doubles import Double, Scaled, decay, two_product, two_sum
from octavo_registry.contract.cards import GATED, Activation

_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR
_ALPHA, _LIMIT = 1.702, 7.0  # of the clamped SwiGLU, as gpt-oss has it
_RATIO = (5.52035999e-05, 0.000132595334, -0.000244929106, -0.00103381288, 0.0010245447, 0.00696972245)
_RATIO_REST = (-0.0104624238, -0.0472627394, 0.230017692, -0.509332001)
_RATIO_LAST = 0.729083717 - 2.38423361e-08
"""Phi(-z) exp(z^2 / 2) (z + 3) as a polynomial of (z - 3) / (z + 3): below 2^-26 on [0, 15]."""


class ValueAndSlope(NamedTuple):
    """An activation and its derivative."""

    value: Array
    slope: Array


def _constant(value: float) -> tuple[np.float32, np.float32]:
    high = np.float32(value)
    return high, np.float32(value - float(high))


def _logistic(x: Array, near: Array, power: Scaled, inner: Array) -> ValueAndSlope:
    """x * sigmoid(v(x)) and its derivative s (1 + (1 - s) x v').

    near    x bounded to where the sigmoid is neither 0 nor 1 in fp32
    power   exp(-|v|)
    inner   x v'
    """
    positive = near >= 0
    small = power.value * power.scale
    denominator = 1 + small
    value = jnp.where(positive, x / denominator, (near * power.value / denominator) * power.scale)
    below = (1 + inner / denominator) * (power.value / denominator) * power.scale
    above = (1 + (small / denominator) * inner) / denominator
    return ValueAndSlope(value, jnp.where(positive, above, below))


def _silu(x: Array) -> ValueAndSlope:
    near = jnp.clip(x, -200, 200)
    return _logistic(x, near, decay(jnp.abs(near)), near)


def _cubic(x: Array, square: Double, linear: float, cubic: float) -> Double:
    """x (linear + cubic x^2)."""
    a, a_rest = _constant(linear)
    b, b_rest = _constant(cubic)
    product = two_product(jnp.full_like(x, b), square.high)
    total = two_sum(jnp.full_like(x, a), product.high)
    rest = total.low + (product.low + b * square.low + b_rest * square.high + a_rest)
    whole = two_product(x, total.high)
    return Double(whole.high, whole.low + x * rest)


def _gelu_tanh(x: Array) -> ValueAndSlope:
    near = jnp.clip(x, -12, 12)
    magnitude = jnp.abs(near)
    square = two_product(near, near)
    argument = _cubic(magnitude, square, _LINEAR, _CUBIC)
    inner = _cubic(near, square, _LINEAR, 3 * _CUBIC)
    return _logistic(x, near, decay(*argument), inner.high + inner.low)


def _normal_ratio(z: Array) -> Array:
    """Phi(-z) exp(z^2 / 2) for 0 <= z <= 15."""
    denominator, numerator = two_sum(z, jnp.full_like(z, 3)), two_sum(z, jnp.full_like(z, -3))
    t = numerator.high / denominator.high
    back = two_product(t, denominator.high)
    rest = (numerator.high - back.high) - back.low + (numerator.low - t * denominator.low)
    h = jnp.full_like(z, _RATIO[0])
    for coefficient in (*_RATIO[1:], *_RATIO_REST):
        h = h * t + np.float32(coefficient)
    last, last_rest = _constant(_RATIO_LAST)
    product = two_product(h, t)
    total = two_sum(jnp.full_like(z, last), product.high)
    low = total.low + (product.low + h * (rest / denominator.high) + last_rest)
    ratio = total.high / denominator.high
    back = two_product(ratio, denominator.high)
    residue = (total.high - back.high) - back.low + (low - ratio * denominator.low)
    return ratio + residue / denominator.high


def _gelu(x: Array) -> ValueAndSlope:
    z = jnp.minimum(jnp.abs(x), 15)
    ratio = _normal_ratio(z)
    power = decay(*two_product(z * np.float32(0.5), z))
    tail = (z * ratio * power.value) * power.scale
    value = jnp.where(x >= 0, x - tail, -tail)
    falling = ((ratio - z * np.float32(1 / math.sqrt(2 * math.pi))) * power.value) * power.scale
    return ValueAndSlope(value, jnp.where(x > 0, 1 - falling, falling))


def _clamped(x: Array) -> ValueAndSlope:
    near = jnp.clip(x, -117, _LIMIT)
    alpha, alpha_rest = _constant(_ALPHA)
    product = two_product(near, jnp.full_like(near, alpha))
    low = product.low + near * alpha_rest
    sign = jnp.where(near >= 0, np.float32(1), np.float32(-1))
    power = decay(sign * product.high, sign * low)
    value, slope = _logistic(jnp.minimum(x, _LIMIT), near, power, product.high + low)
    return ValueAndSlope(value, jnp.where(x > _LIMIT, 0, slope))


def _relu2(x: Array) -> ValueAndSlope:
    positive = jnp.maximum(x, 0)
    return ValueAndSlope(positive * positive, positive + positive)


_UNGATED: dict[Activation, Callable[[Array], ValueAndSlope]] = {
    "silu": _silu,
    "swiglu": _silu,
    "gelu": _gelu,
    "geglu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "geglu_tanh": _gelu_tanh,
    "relu2": _relu2,
    "clamped_swiglu": _clamped,
}
"""The function of x, or of a gated activation's gate."""


def ungated(activation: Activation, x: Array) -> ValueAndSlope:
    """The ungated function of fp32 x and its derivative."""
    return _UNGATED[activation](x)


def _split(x: Array, activation: Activation) -> tuple[Array, Array | None]:
    """(gate or x, its factor or None), in fp32; the factor is up, clamped and plus one in clamped_swiglu."""
    if activation not in GATED:
        return in_fp32(x), None
    features = x.shape[-1] // 2
    gate, up = in_fp32(x[..., :features]), in_fp32(x[..., features:])
    return gate, jnp.clip(up, -_LIMIT, _LIMIT) + 1 if activation == "clamped_swiglu" else up


def _unrounded(x: Array, activation: Activation) -> Array:
    gate, up = _split(x, activation)
    value = ungated(activation, gate).value
    return value if up is None else value * up


def activated(x: Array, activation: Activation, probs: Array | None) -> Array:
    """[..., F] of x [..., C]: fl(fl(act(gate) up) probs), or without a gate fl(act(x) probs), rounded once."""
    value = _unrounded(x, activation)
    return (value if probs is None else value * probs[..., None]).astype(x.dtype)


def activated_gradient(dy: Array, x: Array, activation: Activation, probs: Array | None) -> Array:
    """x's gradient in x's dtype: fl(fl(dy' act'(gate)) up) and fl(dy' act(gate)), with dy' = fl(dy probs); 0 of what
    clamped_swiglu clamps."""
    gate, up = _split(x, activation)
    value, slope = ungated(activation, gate)
    grad = in_fp32(dy) if probs is None else in_fp32(dy) * probs[..., None]
    if up is None:
        return (grad * slope).astype(x.dtype)
    of_up = grad * value
    if activation == "clamped_swiglu":
        of_up = jnp.where(jnp.abs(in_fp32(x[..., x.shape[-1] // 2 :])) > _LIMIT, 0, of_up)
    return jnp.concatenate([(grad * slope * up).astype(x.dtype), of_up.astype(x.dtype)], axis=-1)


def probs_gradient(dy: Array, x: Array, activation: Activation) -> Array:
    """probs' gradient [...], fp32: the sum over a row of dy act(x)."""
    return jnp.sum(in_fp32(dy) * _unrounded(x, activation), axis=-1)
