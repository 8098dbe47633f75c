"""What modules carry from call to call: states of delayed scaling, and seeds."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from octavo import DelayedScaling, Recipe
from octavo_jax.scaling.delayed_state import DelayedState, init_delayed, update_delayed

State = DelayedState | tuple[DelayedState, ...]
"""Of one layer, or of the layers of an MLP in their order."""


def fresh_state(recipe: Recipe | None, groups: int, layers: int = 1) -> State | None:
    """Delayed scaling's state before the first step, a tuple for several layers; None for other recipes."""
    if not isinstance(recipe, DelayedScaling):
        return None
    states = tuple(init_delayed(recipe, groups) for _ in range(layers))
    return states[0] if layers == 1 else states


def update_states(tree: Any, recipe: DelayedScaling | str, *, axis_name: str | tuple[str, ...] = ()) -> Any:
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
