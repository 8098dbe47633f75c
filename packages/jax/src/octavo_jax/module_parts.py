"""What the linen and the nnx modules share: initializers, dtypes, axes, fresh delayed scaling states and their update.

Imports no Flax, so that both flavours' packages stay apart.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from octavo import DelayedScaling, Recipe
from octavo_jax.functions.activations import check_activation
from octavo_jax.scaling.delayed import DelayedState, init_delayed, update_delayed
from octavo_registry.contract.cards import GATED, Activation

Initializer = Callable[..., Any]
State = DelayedState | tuple[DelayedState, ...]
"""Of one layer, or of the layers of an MLP in their order."""

zeros_init: Initializer = jax.nn.initializers.zeros
ones_init: Initializer = jax.nn.initializers.ones
dense_kernel_init: Initializer = jax.nn.initializers.lecun_normal()
"""Of kernels [K, N]."""
grouped_kernel_init: Initializer = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
"""Of kernels [G, K, N]: the fan-in is K, whatever G is."""


def cast(dtype: DTypeLike | None, *arrays: Array | None) -> tuple[Any, ...]:
    """The arrays in `dtype`; None leaves them as they are, and an absent array stays absent."""
    return tuple(a if a is None or dtype is None else a.astype(dtype) for a in arrays)


def as_tuple(value: int | Sequence[int], name: str) -> tuple[int, ...]:
    """One integer or several as a tuple; ValueError for none."""
    try:
        values = (operator.index(value),) if isinstance(value, int) else tuple(operator.index(v) for v in value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; give an integer or a tuple of integers") from None
    if not values:
        raise ValueError(f"{name} is empty; give one or more")
    return values


def contracted_last(x: Array, axis: int | Sequence[int]) -> tuple[Array, tuple[int, ...]]:
    """(x with `axis` as its last axes, in x's order whatever order `axis` has, and their lengths).

    ValueError where an axis is out of range or named twice.
    """
    axes = as_tuple(axis, "axis")
    if any(not -x.ndim <= a < x.ndim for a in axes) or len({a % x.ndim for a in axes}) != len(axes):
        raise ValueError(f"axis is {axis!r} and x has shape {list(x.shape)}; name distinct axes of x")
    inner = tuple(sorted(a % x.ndim for a in axes))
    outer = tuple(a for a in range(x.ndim) if a not in inner)
    return x.transpose(outer + inner), tuple(x.shape[a] for a in inner)


def leading_dims(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """contracting_dims of x's last `count` axes with a kernel's first ones."""
    return tuple(range(-count, 0)), tuple(range(count))


def flattened(init: Initializer, inputs: int) -> Initializer:
    """`init` of a kernel [*in, *out] as it is of [K, N]: its first `inputs` axes are K together, and so its fan-in."""

    def wrapped(key: Array, shape: Sequence[int], dtype: DTypeLike) -> Any:
        made = init(key, (math.prod(shape[:inputs]), math.prod(shape[inputs:])), dtype)
        return jax.tree.map(lambda kernel: kernel.reshape(tuple(shape)), made)  # a box of Flax's is a tree, too

    return wrapped


def inner_columns(hidden: int, activation: Activation) -> int:
    """Columns of wi for `hidden` rows of wo: a gated activation takes a gate and an up projection."""
    return 2 * hidden if check_activation(activation) in GATED else hidden


def fresh_state(recipe: Recipe | None, groups: int, layers: int = 1) -> State | None:
    """Delayed scaling's state before the first step, a tuple for several layers; None for other recipes."""
    if not isinstance(recipe, DelayedScaling):
        return None
    states = tuple(init_delayed(recipe, groups) for _ in range(layers))
    return states[0] if layers == 1 else states


def update_states(tree: Any, recipe: DelayedScaling, *, axis_name: str | tuple[str, ...] = ()) -> Any:
    """`octavo_jax.update_delayed` of every `DelayedState` in `tree`; everything else is left as it is.

    A state with stacked leaves, as a scan over layers or a vmap of modules makes them, is updated layer by layer.
    """
    update = partial(update_delayed, recipe=recipe, axis_name=axis_name)

    def updated(leaf: Any) -> Any:
        if not isinstance(leaf, DelayedState):
            return leaf
        function = update
        for _ in range(leaf.x.scale.ndim - 1):
            function = jax.vmap(function)
        return function(leaf)

    return jax.tree.map(updated, tree, is_leaf=lambda leaf: isinstance(leaf, DelayedState))


def next_seed(base: Array, calls: Array) -> Array:
    """uint32 [2] seed words of a module's call number `calls` (a uint32 scalar)."""
    return base + jnp.stack([calls, jnp.zeros_like(calls)])
