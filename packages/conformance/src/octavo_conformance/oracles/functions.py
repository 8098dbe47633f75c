"""Activations, their gradients and normalizations in float64, each with the largest error that fp32 may make of it.

Bounds, in units u = 2^-24, before the one rounding to the input's dtype (docs/numerics, Activations):
- an activation or its derivative is within 4 ulp, 8 u of its value. Near a derivative's root, on [-4, -1/4], it is the
  absolute error that is small: 8 u of 1/4;
- each product after it adds u, and so does clamped_swiglu's sum up + 1;
- sums over C elements of a row are within 4 sqrt(C) u, as fp32 sums of GEMMs are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import octavo_numerics
from octavo_conformance.problems.inputs import Array
from octavo_registry.contract.cards import GATED

U = 2.0**-24
_FUNCTION, _PRODUCT = 8 * U, U
_SMALLEST_NORMAL = 2.0**-126
"""What a device that flushes subnormals may lose."""


@dataclass(frozen=True, eq=False)
class Exact:
    """float64 values, and the error that fp32 arithmetic may make of each."""

    value: Array
    error: Array


def width(activation: str, features: int) -> int:
    """Columns of the activation's input where its result has `features`."""
    return 2 * features if activation in GATED else features


def _of_factor(activation: str) -> float:
    """What the factor of a gate may be off by, relative to it."""
    return _PRODUCT if activation == "clamped_swiglu" else 0.0


def activated(x: Array, activation: Any, probs: Array | None) -> Exact:
    """act(x), or act(gate) * up, times probs [M], of x [M, C]."""
    value = octavo_numerics.activate(x, activation, probs)
    up = octavo_numerics.activation_parts(x, activation).factor
    terms = (_FUNCTION + 2 * _PRODUCT + _of_factor(activation)) * np.abs(value)
    return Exact(value, terms + _SMALLEST_NORMAL * (1 + np.abs(up)))


def activated_gradient(dy: Array, x: Array, activation: Any, probs: Array | None) -> Exact:
    """The gradient of x [M, C] from dy [M, F]."""
    grad = dy.astype(np.float64)
    if probs is not None:
        grad = grad * probs[:, None].astype(np.float64)
    value, slope, up, passes = octavo_numerics.activation_parts(x, activation)
    gate = x.astype(np.float64)[:, : value.shape[1]]
    near_root = np.where((gate >= -4) & (gate <= -0.25), 0.25, 0)
    terms = np.abs(grad * up) * np.maximum(np.abs(slope), near_root)
    if activation in GATED:
        terms = np.concatenate([terms, np.abs(np.where(passes > 0, grad * value, 0))], axis=1)
        up, grad = np.tile(up, 2), np.tile(grad, 2)
    tiny = _SMALLEST_NORMAL * (1 + np.abs(grad)) * (1 + np.abs(up))
    error = (_FUNCTION + 3 * _PRODUCT + _of_factor(activation)) * terms + tiny
    return Exact(octavo_numerics.activate_gradient(dy, x, activation, probs), error)


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
