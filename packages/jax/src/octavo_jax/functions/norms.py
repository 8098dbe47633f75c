"""RMSNorm and LayerNorm as differentiable functions: fp32 inside, one rounding to the input's dtype."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from octavo.errors import one_of
from octavo_jax.arithmetic.barrier import barrier
from octavo_jax.arithmetic.norm import Normalized, NormGradients, normalized, normalized_gradients
from octavo_jax.arrays.checks import check_arrays
from octavo_jax.arrays.dtypes import dtype_name
from octavo_jax.arrays.numpy_arrays import as_jax
from octavo_jax.arrays.varying import varying_alike
from octavo_jax.functions.forward_mode import refuse_forward_mode
from octavo_registry.contract.cards import Norm


class NormSpec(NamedTuple):
    """A normalization: "rms" or "layer", and what is added to the mean square."""

    norm: Norm
    epsilon: float


# barriers as in `octavo_jax.functions.activations`
@partial(jax.jit, static_argnames="spec")
def octavo_normalization(x: Array, gamma: Array, beta: Array | None, *, spec: NormSpec) -> Normalized:
    """The normalized rows, rounded once to x's dtype, and their statistics."""
    (x,) = barrier(x)
    result = normalized(x, gamma, beta, spec.norm, spec.epsilon)
    return result._replace(y=barrier(result.y)[0])


@jax.jit
def octavo_normalization_gradient(dy: Array, x: Array, gamma: Array, mean: Array | None, rstd: Array) -> NormGradients:
    """The gradients of x, gamma and beta."""
    dy, x = barrier(dy, x)
    return normalized_gradients(dy, x, gamma, mean, rstd)


class _Saved(NamedTuple):
    x: Array
    gamma: Array
    beta: Array | None
    mean: Array | None
    rstd: Array


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normalize(x: Array, gamma: Array, beta: Array | None, spec: NormSpec) -> Array:
    y: Array = octavo_normalization(x, gamma, beta, spec=spec).y
    return y


def _forward(x: Array, gamma: Array, beta: Array | None, spec: NormSpec) -> tuple[Array, _Saved]:
    result = octavo_normalization(x, gamma, beta, spec=spec)
    return result.y, _Saved(x, gamma, beta, result.mean, result.rstd)


def _backward(spec: NormSpec, saved: _Saved, dy: Array) -> tuple[Array, Array, Array | None]:
    result = octavo_normalization_gradient(dy, saved.x, saved.gamma, saved.mean, saved.rstd)
    return result.dx, result.dgamma, None if saved.beta is None else result.dbeta


_normalize.defvjp(_forward, _backward)


def _check_kind(epsilon: object) -> None:
    if isinstance(epsilon, jax.core.Tracer):
        raise ValueError(f"epsilon is {epsilon}; it is compiled in, so give a number, or make it static under jax.jit")
    if isinstance(epsilon, str | bytes | None):
        raise ValueError(f"epsilon is {epsilon!r}; give a number")


def check_norm(norm: Norm, epsilon: float, x: Array, gamma: Array, beta: Array | None) -> NormSpec:
    """The normalization that these arguments name; ValueError where they do not fit x [..., C]."""
    one_of("norm", norm, get_args(Norm))
    _check_kind(epsilon)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon is {epsilon!r}; it must be more than 0, or a row of zeros has no rstd, and finite")
    dtype_name(x.dtype, "x")
    if not x.ndim:
        raise ValueError("x has no axis; give one or more, the last of features")
    if beta is not None and norm == "rms":
        raise ValueError("beta was given and norm is 'rms', which has none; leave it out or use 'layer'")
    given = {"gamma": gamma} if beta is None else {"gamma": gamma, "beta": beta}
    check_arrays(**given)
    for name, array in given.items():
        if array.shape != x.shape[-1:] or array.dtype != x.dtype:
            raise ValueError(
                f"{name} has shape {list(array.shape)} and dtype {array.dtype}; x {list(x.shape)} needs "
                f"[{x.shape[-1]}] in its own dtype, {x.dtype}"
            )
    return NormSpec(norm, float(epsilon))


def normalize(x: Array, gamma: Array, beta: Array | None = None, *, norm: Norm = "rms", epsilon: float = 1e-6) -> Array:
    """(x - mean) * rstd * gamma + beta over the last axis, rstd = 1 / sqrt(mean((x - mean)^2) + epsilon).

    x            [..., C] bf16, fp16 or fp32
    gamma, beta  [C] in x's dtype; RMSNorm subtracts no mean and takes no beta
    norm         "rms" or "layer"

    An Explicit mesh may cut any of them: gamma and beta are moved to where x's last axis has them.

    Returns [..., C] in x's dtype, computed in fp32 and rounded once. Reverse-mode differentiable once in x, gamma and
    beta; gamma's and beta's gradients are fp32 sums over x's leading axes, and XLA may add several axes in another
    order than the same rows as [M, C], which is how layers normalize. Raises ValueError for arguments that do not fit.
    """
    x = jnp.asarray(x)
    spec = check_norm(norm, epsilon, x, gamma, beta)
    arrays = varying_alike(_cut_alike(*as_jax((x, gamma, beta))))
    return _normalize(*refuse_forward_mode("normalize", arrays), spec)


def _cut_alike(x: Array, *scales: Array | None) -> tuple[Array | None, ...]:
    """x, and what is [C], cut as an Explicit mesh cuts x's last axis; the transpose puts a gradient back."""
    lying = jax.typeof(x).sharding
    target = PartitionSpec(*lying.spec[-1:])  # type: ignore[no-untyped-call]

    def moved(scale: Array | None) -> Array | None:
        if scale is None or jax.typeof(scale).sharding.spec == target:
            return scale
        result: Array = jax.sharding.reshard(scale, NamedSharding(lying.mesh, target))  # type: ignore[no-untyped-call]
        return result

    return x, *(scale if lying.mesh.empty else moved(scale) for scale in scales)
