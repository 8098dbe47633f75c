"""Activations as differentiable functions: fp32 inside, one rounding to the input's dtype."""

from __future__ import annotations

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
from jax import Array

from octavo.errors import one_of
from octavo_jax.arithmetic.barrier import barrier
from octavo_jax.arrays.checks import check_arrays
from octavo_jax.arrays.dtypes import dtype_name
from octavo_jax.arrays.numpy_arrays import as_jax
from octavo_jax.arrays.varying import varying_alike
from octavo_jax.functions.activation_formulas import activated, activated_gradient, probs_gradient
from octavo_jax.functions.derivatives import refusing_derivatives
from octavo_jax.functions.forward_mode import refuse_forward_mode
from octavo_registry.contract.cards import GATED, Activation

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


# corrections of roundings have no derivative, and would be lost
once_differentiated = refusing_derivatives(
    "the gradient of an activation of octavo was differentiated, alone or in an MLP, and it has no derivative: "
    "differentiate once, in reverse, or take an activation of jax.nn"
)


# Barriers keep a compiler from fusing these with their neighbours, which would change last bits from one program to
# the next; so fused and unfused layers of one backend agree.
@partial(jax.jit, static_argnames="activation")
def octavo_activation(x: Array, probs: Array | None, *, activation: Activation) -> Array:
    """The result [..., F] of x [..., C], rounded once to x's dtype."""
    (x,) = barrier(once_differentiated(x))
    (result,) = barrier(activated(x, activation, probs))
    return result


@partial(jax.jit, static_argnames="activation")
def octavo_activation_gradient(dy: Array, x: Array, probs: Array | None, *, activation: Activation) -> Array:
    """x's gradient [..., C] of dy [..., F], rounded once to x's dtype."""
    dy, x = barrier(once_differentiated(dy), once_differentiated(x))
    (result,) = barrier(activated_gradient(dy, x, activation, probs))
    return result


@partial(jax.jit, static_argnames="activation")
def octavo_probs_gradient(dy: Array, x: Array, *, activation: Activation) -> Array:
    """fp32 [...]: the sum over a row of dy and the activation's unrounded result."""
    return probs_gradient(once_differentiated(dy), once_differentiated(x), activation)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _activate(x: Array, probs: Array | None, activation: Activation) -> Array:
    y: Array = octavo_activation(x, probs, activation=activation)
    return y


def _forward(x: Array, probs: Array | None, activation: Activation) -> tuple[Array, tuple[Array, Array | None]]:
    return octavo_activation(x, probs, activation=activation), (x, probs)


def _backward(activation: Activation, saved: tuple[Array, Array | None], dy: Array) -> tuple[Array, Array | None]:
    x, probs = saved
    dprobs = None if probs is None else octavo_probs_gradient(dy, x, activation=activation)
    return octavo_activation_gradient(dy, x, probs, activation=activation), dprobs


_activate.defvjp(_forward, _backward)


def check_activation(activation: Activation) -> Activation:
    """`activation`; ValueError for an unknown name."""
    return one_of("activation", activation, ACTIVATIONS)


def features(columns: int, activation: Activation, what: str) -> int:
    """F of an activation's input with `columns` columns; ValueError, naming `what`, where a gate has no partner."""
    if activation not in GATED:
        return columns
    if columns % 2:
        raise ValueError(f"{what} has {columns} columns; {activation} needs 2 F: a gate, then an up projection")
    return columns // 2


def check_per_row(name: str, values: Array | None, shape: tuple[int, ...]) -> None:
    """ValueError unless values, called `name`, are None or float32 of this shape."""
    if values is None:
        return
    check_arrays(**{name: values})
    if values.shape != shape or values.dtype != jnp.float32:
        raise ValueError(
            f"{name} has shape {list(values.shape)} and dtype {values.dtype}; give one float32 per row, {list(shape)}"
        )


def activate(x: Array, activation: Activation, *, probs: Array | None = None) -> Array:
    """act(x), or act(gate) * up where the activation is gated, times `probs` row by row.

    x           [..., F], or [..., 2 F] with the gate first for a gated activation; bf16, fp16 or fp32
    activation  silu, gelu (with erf), gelu_tanh, relu2, swiglu, geglu, geglu_tanh or clamped_swiglu, gpt-oss's
                g * sigmoid(1.702 g) * (u + 1), with g = min(gate, 7) and u = up clamped to [-7, 7]
    probs       [...] float32

    Returns [..., F] in x's dtype, computed in fp32 within 4 ulp of float64 and rounded once. Reverse-mode
    differentiable once in x and probs: the gradient of x is fp32 and rounded once, too. Raises ValueError for arguments
    that do not fit.
    """
    x = jnp.asarray(x)
    dtype_name(x.dtype, "x")
    if not x.ndim:
        raise ValueError("x has no axis; give one or more, the last of features")
    name = check_activation(activation)
    features(x.shape[-1], name, "x")
    check_per_row("probs", probs, x.shape[:-1])
    return _activate(*refuse_forward_mode("activate", varying_alike(as_jax((x, probs)))), name)
