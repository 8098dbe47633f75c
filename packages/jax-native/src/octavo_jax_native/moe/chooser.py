"""A router: the bound functions of octavo_registry.contract.moves, one call each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from octavo_jax.plugin_api import check_array, check_input
from octavo_jax_native.arrays.words import as_int64
from octavo_jax_native.ffi import router
from octavo_registry.contract import RouterRule


def choose_experts(
    logits: Array, bias: Array | None, replay: Array | None, rule: RouterRule, /
) -> tuple[Array, Array, Array]:
    """Choices int32 [T, k], weights and counts int32 [E]; see octavo_jax.choose_experts."""
    check_input(logits, "logits", (2,))
    if bias is not None:
        check_array(bias, "bias", (logits.shape[1],), jnp.float32)
    if replay is not None:
        check_array(replay, "replay", (logits.shape[0], rule.k), replay.dtype)
    made: tuple[Array, Array, Array] = octavo_choose(logits, bias, replay, rule)
    return made


@jax.jit(static_argnums=3)
def octavo_choose(
    logits: Array, bias: Array | None, replay: Array | None, rule: RouterRule
) -> tuple[Array, Array, Array]:
    operands = {"logits": logits}
    if bias is not None:
        operands["bias"] = bias
    if replay is not None:
        operands["replay"] = as_int64(replay.reshape(-1))
    return router.choose(operands, rule)


def choose_gradient(logits: Array, choices: Array, dweights: Array, rule: RouterRule, /) -> Array:
    """dlogits [T, E] from the gradient of the weights."""
    check_input(logits, "logits", (2,))
    check_array(dweights, "dweights", (logits.shape[0], rule.k), jnp.float32)
    check_array(choices, "choices", dweights.shape, choices.dtype)
    dlogits: Array = octavo_choose_gradient(logits, choices, dweights, rule)
    return dlogits


@jax.jit(static_argnums=3)
def octavo_choose_gradient(logits: Array, choices: Array, dweights: Array, rule: RouterRule) -> Array:
    operands = {"logits": logits, "choices": as_int64(choices.reshape(-1)), "dweights": dweights}
    return router.choose_gradient(operands, rule)
