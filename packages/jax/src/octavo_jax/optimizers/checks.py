"""What AdamW is given, each part refused by its name: hyperparameters, gradients, masks, delayed states."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo_jax.arithmetic.widening import in_fp32
from octavo_jax.arrays.dtypes import DTYPES
from octavo_jax.scaling.delayed_state import DelayedState

_OF_MASTERS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))

_NO_ARRAYS = (
    "give a number, which is part of the program. optax.inject_hyperparams makes arrays of all but what its "
    "static_args name: b1, b2, eps, weight_decay, master_dtype, state_bits and seed; or give it up, for learning_rate "
    "may be a schedule or an array without it"
)

NO_DERIVATIVE = (
    "a step of AdamW was differentiated, and its operations on bits have no derivative: give it "
    "jax.lax.stop_gradient of its gradients, parameters and learning rate, or differentiate a step of optax.adamw"
)


def check_learning_rate(rate: object) -> None:
    """ValueError unless it is a schedule, a scalar array of float32 or wider, or a finite number of at least 0."""
    if callable(rate):
        return
    if not isinstance(rate, jax.Array):
        _check_finite("learning_rate", rate)
    elif rate.ndim or not jnp.issubdtype(rate.dtype, jnp.floating):
        raise ValueError(f"learning_rate has shape {list(rate.shape)} and dtype {rate.dtype}; give a float scalar")
    elif rate.dtype.itemsize < 4:
        raise ValueError(
            f"learning_rate is an array of {rate.dtype}, to which it was rounded; give float32. "
            "optax.inject_hyperparams rounds it to the dtype of the parameters unless hyperparam_dtype=jnp.float32 is "
            "given"
        )


def check_constants(*, b1: object, b2: object, eps: object, weight_decay: object, state_bits: object) -> None:
    """ValueError unless these are numbers in their ranges: they are part of the program, so none is an array."""
    given = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay, "state_bits": state_bits}
    for name, value in given.items():
        if isinstance(value, jax.Array):
            raise ValueError(f"{name} is a jax.Array; {_NO_ARRAYS}")
    _check_finite("eps", eps)
    _check_finite("weight_decay", weight_decay)
    for name, beta in (("b1", b1), ("b2", b2)):
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < 1:
            raise ValueError(f"{name} is {beta!r}; give a number from 0 to below 1")
    if state_bits not in (32, 8):
        raise ValueError(f"state_bits is {state_bits!r}; give 32 or 8")


def _check_finite(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; give a finite number of at least 0")


def check_master_dtype(dtype: Any) -> None:
    """ValueError unless it is float32 or bfloat16."""
    try:
        known = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        known = None
    if known not in _OF_MASTERS:
        raise ValueError(f"master_dtype is {repr(dtype) if known is None else known}; give float32 or bfloat16")


def check_no_states(params: Any) -> None:
    """ValueError for a delayed state among the parameters: a step would take its new value for a derivative."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda leaf: isinstance(leaf, DelayedState))
    for path, leaf in leaves:
        if isinstance(leaf, DelayedState):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is a DelayedState, whose gradient is its new value; keep it out "
                "of what an optimizer steps (optax.masked), overwrite it with its gradient and call update_delayed"
            )


def decays_of(mask: Any, params: Any) -> list[bool]:
    """Whether each leaf of `params` decays: `mask` is a tree like it, or a prefix of one, as optax takes masks.

    ValueError for another tree, and for what is neither True nor False.
    """
    tree: Any
    given, tree = jax.tree_util.tree_flatten_with_path(mask)
    try:
        parts = tree.flatten_up_to(params)
    except (ValueError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(
            f"mask has another structure than params: {first}; give a tree like it, or one with a boolean in the place "
            "of a whole part"
        ) from None
    for path, decays in given:
        if not isinstance(decays, bool | np.bool_):
            raise ValueError(f"mask{jax.tree_util.keystr(path)} is {decays!r}; give True or False")
    return [bool(decays) for (_, decays), part in zip(given, parts, strict=True) for _ in jax.tree.leaves(part)]


def checked_gradient(path: str, grad: Any, parameter: Array) -> Array:
    """The gradient in float32; ValueError for one of another shape or dtype than the parameter at this path takes."""
    if grad is None:
        raise ValueError(f"grads{path} is None; give float32, bfloat16 or float16 {list(parameter.shape)}")
    grad = jnp.asarray(grad)
    if grad.shape != parameter.shape or grad.dtype not in DTYPES:
        raise ValueError(
            f"grads{path} is {grad.dtype} {list(grad.shape)} and the parameter {list(parameter.shape)}; give float32, "
            "bfloat16 or float16 of that shape"
        )
    return in_fp32(grad)
