"""Noticing that `jax.grad` returns a sum of several delayed states, or of none.

JAX adds up the cotangents of what is used twice, and the cotangent of a state is its new value (see `DelayedState`).
The uses may be in traces of their own (`jax.checkpoint`, a scan that closes over the state), where none of them can
notice the others. But all of them meet where the differentiated function is given its state, so that is where this
module has a rule of differentiation, which sees the state and what came back for it. Every call leaves the scale and
the finished steps of the history as they were, so a sum of several calls has twice as much or more of all of them.

A sum of several states becomes NaN, or a ValueError where values lie on a CPU. The sum of none is 0 and becomes the
state from before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad

from octavo_jax.arrays.host import is_on_host

SUMMED = (
    "several calls in one differentiated function took one DelayedState, or shards of a jax.shard_map with "
    "check_vma=False did, and JAX added up the states that they recorded, history and scale included: give each call "
    "the state that the one before it returned (linen: make the collection mutable; nnx: give the module to nnx's "
    "transformations, and let nnx.scan carry it)"
)
UNUSED = (
    "no call in the differentiated function took this DelayedState, or its result did not reach the loss, and JAX's "
    "gradient of what is not used is 0: keep the state from before in its place"
)

Histories = tuple[Any, ...]


def is_argument_of_gradient(leaf: object) -> bool:
    """Whether `jax.grad` or `jax.vjp` made this traced array for an argument of the function that they differentiate.

    JAX says so in attributes that it does not document. Where it renames them the answer is False, and sums are not
    noticed.
    """
    if not isinstance(leaf, jax.core.Tracer) or isinstance(leaf, ad.JVPTracer):
        return False
    call_reverse_mode_only = getattr(getattr(leaf, "_trace", None), "is_vjp", False)
    return bool(call_reverse_mode_only) and getattr(getattr(leaf, "tangent", None), "parent", leaf) is None


def is_unused(history: Any, scale: Any) -> Any:
    """bool [..., G], of values or of their bits: the zeros that JAX's gradient of an unused state is. A state that
    recorded nothing has another scale, and one whose scale is as small as that has recorded something."""
    return (scale == 0) & (history == 0).all(axis=-2)


@jax.custom_vjp
def refusing_sums(histories: Histories) -> Histories:
    """The identity of a layer's histories, whose "gradient" is checked.

    histories   one for each operand, with arrays `history` [..., H, G] and `scale` [..., G]

    A "gradient" that is a sum of several calls' states gets scales and running amaxes of NaN, which the next update
    keeps; ValueError where it lies on a CPU. One of 0, which a branch that did not run leaves, is replaced by the
    histories from before.
    """
    return histories


def _checked(before: Histories, after: Histories) -> tuple[Histories]:
    # JAX adds up the operands' arrays together, so the scale of one tells; some have no running amax.
    summed = _is_sum(before[0], after[0], [one.history[..., 0, :] for one in after])
    if is_on_host(summed) and bool(summed.any()):
        raise ValueError(SUMMED)
    return (tuple(_corrected(*both, summed) for both in zip(before, after, strict=True)),)


refusing_sums.defvjp(lambda histories: (histories, histories), _checked)


@jax.jit
def _is_sum(before: Any, after: Any, running: list[Array]) -> Array:
    """bool [..., G]: whether scale and finished steps are those of two calls or more, and not of one or none.

    A rule of somebody's own that ends the step by `update_delayed` changes both, too, and leaves no running amax.
    """
    finished = _is_multiple(after.history[..., 1:, :], before.history[..., 1:, :])
    scaled = _is_multiple(after.scale, before.scale) & (after.scale > before.scale)
    summed: Array = scaled & jnp.all(finished, axis=-2) & (sum(running) > 0)
    return summed


def _is_multiple(value: Array, of: Array) -> Array:
    """Whether `value` may be the sum of two or more of `of`, however it was rounded: 0 is one of 0 alone."""
    return jnp.where(of == 0, value == 0, value >= 1.5 * of)


@jax.jit
def _corrected(before: Any, after: Any, summed: Array) -> Any:
    unused = is_unused(after.history, after.scale)
    scale = jnp.where(unused, before.scale, after.scale)
    history = jnp.where(jnp.expand_dims(unused, -2), before.history, after.history)
    running = jnp.where(summed, jnp.nan, history[..., 0, :])
    return replace(after, history=history.at[..., 0, :].set(running), scale=jnp.where(summed, jnp.nan, scale))
