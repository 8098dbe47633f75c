"""Checks of a router's arrays."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from octavo_jax.arrays.checks import check_arrays
from octavo_jax.arrays.dtypes import dtype_name


def check_choices(name: str, choices: Array, logits: Array) -> None:
    """ValueError unless `choices`, called `name`, are integers [T, k], at least one for each of the tokens."""
    check_arrays(**{name: choices})
    if choices.ndim != 2 or not jnp.issubdtype(choices.dtype, jnp.integer):
        raise ValueError(
            f"{name} has shape {list(choices.shape)} and dtype {choices.dtype}; give integers [T, k], the expert of "
            "each choice"
        )
    if choices.shape[0] != logits.shape[0] or not choices.shape[1]:
        raise ValueError(
            f"{name} has shape {list(choices.shape)} and logits {list(logits.shape)}; give [{logits.shape[0]}, k], "
            "with at least one choice per token"
        )


def check_bias(name: str, bias: Array | None, experts: int) -> None:
    """ValueError unless `bias`, called `name`, is None or one float for each of the experts."""
    if bias is None:
        return
    check_arrays(**{name: bias})
    if bias.shape != (experts,):
        raise ValueError(f"{name} has shape {list(bias.shape)}; give [{experts}], one number per expert")
    dtype_name(bias.dtype, name)


def check_logits(logits: Array) -> None:
    check_arrays(logits=logits)
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"logits has shape {list(logits.shape)}; give [T, E], with leading axes flattened")
    dtype_name(logits.dtype, "logits")
