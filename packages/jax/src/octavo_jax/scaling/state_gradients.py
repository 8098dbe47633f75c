"""A gradient that leaves out delayed scaling's state: a warning, because the history would never see dy's amax.

The amax of dy exists in the backward pass alone and comes back as the "gradient" of the state. A program that
differentiates a layer's arrays and not its state runs, and its scales stay what they are for ever.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
from jax import Array
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from octavo.caller import stacklevel_of_caller
from octavo_jax.scaling.delayed_state import DelayedState


@jax.custom_vjp
def watched_state(state: DelayedState, arrays: list[Array]) -> DelayedState:
    """`state`; UserWarning where some of `arrays` are differentiated and the state is not."""
    return state


def _watched(state: Any, arrays: Any) -> tuple[DelayedState, None]:
    if is_differentiated(arrays) and not is_differentiated(state):
        warnings.warn(
            "a layer with delayed scaling is differentiated and its DelayedState is not: the amax of the gradient is "
            "lost, and scales that nobody updates stay as they are. Differentiate with respect to the state, too, "
            "overwrite it with the result and update it once per step: octavo_jax.update_delayed for functions, "
            "nnx.DiffState(0, nnx.Any(nnx.Param, octavo_jax.nnx.ScalingState)) for nnx modules, the collection "
            "octavo_jax.linen.STATE_COLLECTION for linen modules",
            stacklevel=stacklevel_of_caller(),
        )
    values: DelayedState = custom_vjp_primal_tree_values(state)  # type: ignore[no-untyped-call]
    return values, None


def is_differentiated(tree: Any) -> bool:
    """Whether the forward rule of a custom_vjp with symbolic zeros was given an array of `tree` that is."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))
    return any(leaf.perturbed for leaf in leaves)


def instantiated(tree: Any) -> Any:
    """`tree` with arrays for the symbolic zeros that a backward rule may be given."""

    def array(leaf: Any) -> Any:
        return leaf.instantiate() if isinstance(leaf, SymbolicZero) else leaf

    return jax.tree.map(array, tree, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))


def _unwatched(_: None, later: Any) -> tuple[Any, None]:
    return instantiated(later), None


watched_state.defvjp(_watched, _unwatched, symbolic_zeros=True)
