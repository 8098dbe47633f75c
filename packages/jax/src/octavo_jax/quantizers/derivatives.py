"""Quantizers have no derivative: a program that asks for one is refused with a sentence, and never given zeros."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
from jax import Array

from octavo_jax.arrays.numpy_arrays import as_jax
from octavo_jax.arrays.varying import varying_axes, varying_over
from octavo_jax.functions.forward_mode import is_differentiable, refuse_forward_mode
from octavo_jax.scaling.delayed_state import DelayedState, shared_state
from octavo_jax.scaling.state_gradients import watched_state

Result = TypeVar("Result")
Arrays = TypeVar("Arrays")


_OF_QUANTIZER = (
    "a quantizer of octavo was differentiated, and codes have no derivative: differentiate layers "
    "(octavo_jax.grouped_dense and the like) once, in reverse, and give a quantizer of your own "
    "jax.lax.stop_gradient(x)"
)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _same(x: Array, why: str) -> Array:
    return x


@_same.defjvp
def _refused(why: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(why)


def undifferentiated(arrays: Arrays, why: str = _OF_QUANTIZER) -> Arrays:
    """`arrays`, an array or a tree; TypeError, which says `why`, where a derivative is taken through one. Second
    derivatives of layers are refused so, too."""
    refusing: Arrays = jax.tree.map(lambda x: _same(as_jax(x), why) if isinstance(x, jax.core.Tracer) else x, arrays)
    return refusing


def call_reverse_mode_only(name: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """`function(*arguments)` for the public function called `name`, which may be differentiated in reverse mode alone.

    Forward-mode differentiation of it (`jax.jvp`, `jax.linearize`, inside of `jax.jit` and outside) is a TypeError with
    its name. A gradient that leaves out a delayed state warns, see `octavo_jax.scaling.state_gradients`. Inside
    `jax.shard_map` every array has one type from here on, as custom_vjps want it; what transposes that sums gradients
    of arrays that shards share, and takes the largest of their amaxes of a delayed state.
    """
    # states are spared, because their "gradients" are not derivatives
    return function(*_watched(refuse_forward_mode(name, _of_one_type(as_jax(arguments)), _is_state)))


def _is_state(leaf: Any) -> bool:
    return isinstance(leaf, DelayedState)


def _of_one_type(arguments: Any) -> Any:
    """`arguments` inside `jax.shard_map`, whose arrays all differ over the mesh axes over which one of them does."""
    axes = varying_axes(arguments)
    if not axes:
        return arguments

    def cast(leaf: Any) -> Any:
        return shared_state(leaf, axes) if _is_state(leaf) else varying_over(leaf, axes)

    return jax.tree.map(cast, arguments, is_leaf=_is_state)


def _watched(arguments: Any) -> Any:
    """`arguments`, whose states warn where other arrays are differentiated and they are not."""
    leaves = jax.tree.leaves(arguments, is_leaf=_is_state)
    arrays = [leaf for leaf in leaves if not _is_state(leaf) and is_differentiable(leaf)]
    if not arrays:
        return arguments

    def passed(leaf: Any) -> Any:
        return watched_state(leaf, arrays) if _is_state(leaf) else leaf

    return jax.tree.map(passed, arguments, is_leaf=_is_state)
