"""RMSNorm and LayerNorm in fp32, and their gradients.

    y  = fl(fl(fl(x - mean) rstd) gamma) + beta, rstd = 1 / sqrt(mean((x - mean)^2) + epsilon)
    dx = rstd (g - mean(g) - xhat mean(g xhat)), g = dy gamma, xhat = (x - mean) rstd

RMSNorm has no mean, no beta, and no term mean(g).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo_jax.arithmetic.widening import in_fp32
from octavo_registry.contract.cards import Norm


class Normalized(NamedTuple):
    """y [..., C] in x's dtype; mean (LayerNorm's) and rstd [...] fp32."""

    y: Array
    mean: Array | None
    rstd: Array


class NormGradients(NamedTuple):
    """dx in x's dtype, dgamma and dbeta [C] in gamma's; dbeta is None for RMSNorm."""

    dx: Array
    dgamma: Array
    dbeta: Array | None


def _along_rows(parameter: Array, x: Array) -> Array:
    """fp32 [C] with as many axes as x has."""
    return in_fp32(parameter).reshape((1,) * (x.ndim - 1) + parameter.shape)


def normalized(x: Array, gamma: Array, beta: Array | None, norm: Norm, epsilon: float) -> Normalized:
    """The rows of x [..., C], normalized, scaled by gamma [C] and shifted by beta, rounded once to x's dtype."""
    centered, mean = in_fp32(x), None
    if norm == "layer":
        mean = jnp.mean(centered, axis=-1)
        centered = centered - mean[..., None]
        # what the sum's and the mean's rounding left over: x - mean may cancel
        centered = centered - jnp.mean(centered, axis=-1, keepdims=True)
    rstd = 1 / jnp.sqrt(jnp.mean(centered * centered, axis=-1) + np.float32(epsilon))
    y = centered * rstd[..., None] * _along_rows(gamma, x)
    return Normalized((y if beta is None else y + _along_rows(beta, x)).astype(x.dtype), mean, rstd)


def normalized_gradients(dy: Array, x: Array, gamma: Array, mean: Array | None, rstd: Array) -> NormGradients:
    """The gradients of x, gamma and beta from dy [..., C], each rounded once."""
    centered = in_fp32(x) if mean is None else in_fp32(x) - mean[..., None]
    normal = centered * rstd[..., None]
    wide_dy = in_fp32(dy)
    grad = wide_dy * _along_rows(gamma, x)
    rest = grad - normal * jnp.mean(grad * normal, axis=-1, keepdims=True)
    if mean is not None:
        rest = rest - jnp.mean(grad, axis=-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    dgamma = jnp.sum(wide_dy * normal, axis=rows).astype(gamma.dtype)
    dbeta = None if mean is None else jnp.sum(wide_dy, axis=rows).astype(gamma.dtype)
    return NormGradients((rest * rstd[..., None]).astype(x.dtype), dgamma, dbeta)
