"""Quantizers have no derivative: a program that asks for one is refused with a sentence, and never given zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import Array

from octavo_jax.arrays.varying import varying_axes, varying_over
from octavo_jax.scaling.delayed_state import DelayedState, shared_state

Result = TypeVar("Result")


@jax.custom_jvp
def _same(x: Array) -> Array:
    return x


@_same.defjvp
def _refused(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "a quantizer of octavo was differentiated, and codes have no derivative: differentiate layers "
        "(octavo_jax.grouped_dense and the like) once, in reverse, and give a quantizer of your own "
        "jax.lax.stop_gradient(x)"
    )


def undifferentiated(x: Array) -> Array:
    """x; TypeError where a derivative is taken through it, second derivatives of layers among them."""
    return _same(x) if isinstance(x, jax.core.Tracer) else x


def in_reverse(name: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """`function(*arguments)`, with a sentence where `jax.jvp` differentiates the public function called `name`.

    Inside `jax.shard_map` every array has one type from here on, as custom_vjps want it; what transposes that sums
    gradients of arrays that shards share, and takes the largest of their amaxes of a delayed state.
    """
    try:
        return function(*_alike(arguments))
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise TypeError(
            f"{name} was given to forward-mode differentiation (jax.jvp, jax.jacfwd, jax.hessian) and is a custom_vjp "
            "function: rounding to codes has no derivative to push forward, so use jax.grad or jax.vjp"
        ) from None


def _alike(arguments: Any) -> Any:
    axes = varying_axes(arguments)
    if not axes:
        return arguments

    def cast(leaf: Any) -> Any:
        return shared_state(leaf, axes) if isinstance(leaf, DelayedState) else varying_over(leaf, axes)

    return jax.tree.map(cast, arguments, is_leaf=lambda leaf: isinstance(leaf, DelayedState))
