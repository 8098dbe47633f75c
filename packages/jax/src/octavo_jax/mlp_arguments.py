"""Arguments of an MLP: checked where they come in."""

from __future__ import annotations

from typing import Any

from jax import Array

from octavo import Recipe
from octavo_jax.activations import features
from octavo_jax.layer_arguments import check_state
from octavo_registry.cards import Activation


def check_mlp_operands(
    x: Array, wi: Array, wo: Array, bi: Array | None, bo: Array | None, activation: Activation
) -> None:
    """ValueError unless x [..., K], wi [*G, K, C] and wo [*G, F, N] with their biases fit."""
    group = list(wi.shape[:-2])
    k, c = wi.shape[-2:]
    f = features(c, activation, f"wi {list(wi.shape)}")
    if x.ndim < 2 or x.shape[-1] != k:
        raise ValueError(f"x has shape {list(x.shape)} and wi {list(wi.shape)} takes K = {k}; x is [..., M, {k}]")
    if wo.ndim != wi.ndim or wo.shape[:-1] != (*wi.shape[:-2], f):
        raise ValueError(
            f"wo has shape {list(wo.shape)}; wi {list(wi.shape)} with {activation} needs {[*group, f, 'N']}"
        )
    if 0 in (*wi.shape, *wo.shape):
        raise ValueError(f"wi has shape {list(wi.shape)} and wo {list(wo.shape)}; every axis is one or more")
    for name, bias, columns in (("bi", bi, c), ("bo", bo, wo.shape[-1])):
        if bias is not None and bias.shape != (*wi.shape[:-2], columns):
            raise ValueError(f"{name} has shape {list(bias.shape)}; it is {[*group, columns]}")


def check_states(recipe: Recipe | None, state: Any, groups: int) -> None:
    """ValueError unless there is a pair of states exactly where the recipe keeps them."""
    pair = isinstance(state, tuple) and len(state) == 2
    if state is not None and not pair:
        raise ValueError(
            f"state is a {type(state).__name__}; give a pair of DelayedState, fc1's and fc2's "
            "(octavo_jax.init_delayed makes one)"
        )
    for one in state if pair else (None,):
        check_state(recipe, one, groups)
