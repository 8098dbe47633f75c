"""Experts that are spread over the devices of mesh axes: what each device runs, inside a manual region.

With T tokens per device, D devices and G experts on each, device d holds the experts d * G to d * G + G - 1. Rows of an
expert are in the order of the devices and, within one, of their tokens: as on one device that holds all tokens. So
what is quantized of them is the same to the bit.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from octavo_jax.arrays.recipes import as_recipe
from octavo_jax.arrays.sizes import end_of
from octavo_jax.dispatch.device import device_of
from octavo_jax.mlp.mlp import States
from octavo_jax.moe.arrangement import arrange, arranged
from octavo_jax.moe.exchange import Exchange, TokenExchange, Way, everywhere, home
from octavo_jax.moe.experts import LocalExperts, check_experts
from octavo_jax.moe.permutation import combine, permute, row_weights
from octavo_jax.moe.ragged_exchange import away, back, slices
from octavo_jax.moe.routing import Choices

LACKING = ("cpu",)
"""Platforms whose XLA has no ragged_all_to_all."""


def chosen_way(exchange: Exchange, k: int, devices: int, platform: str) -> Way:
    """The way of an exchange among `devices` of a platform; ValueError where the platform lacks it."""
    if exchange.way == "ragged" and platform in LACKING:
        raise ValueError("way is 'ragged' and XLA:CPU has no ragged_all_to_all; use 'gather', or None for what fits")
    if exchange.way is not None:
        return exchange.way
    return "ragged" if platform not in LACKING and k < devices else "gather"


def spread_mlp(
    x: Array, choices: Choices, experts: LocalExperts, axes: tuple[str, ...], exchange: Exchange
) -> tuple[Array, Array, States | None]:
    """(y [T, N], choices of these tokens or rows of these experts that were dropped, new state or None).

    x         [T, K], this device's tokens
    choices   theirs, among all D * G experts
    experts   this device's G
    axes      over which the experts are spread, manual ones
    """
    check_experts(x, experts.weights_on)
    devices, (tokens, k) = lax.axis_size(axes), choices.experts.shape
    if not tokens:
        raise ValueError(
            f"x has no tokens and mesh axes {list(axes)} spread the experts; give each of their devices a token or "
            "more: those that the mask leaves out cost no row"
        )
    most = devices * tokens * min(k, experts.number)
    rows = most if exchange.rows is None else min(exchange.rows, most)
    token_exchange = TokenExchange.of(axes, as_recipe(exchange.payload), experts.options["backend"])
    run = _gathered if chosen_way(exchange, k, devices, device_of(x).kind) == "gather" else _ragged
    return run(x, choices, experts, token_exchange, rows)


def _gathered(
    x: Array, choices: Choices, experts: LocalExperts, token_exchange: TokenExchange, rows: int
) -> tuple[Array, Array, States | None]:
    numbers, weights = (lax.all_gather(a, token_exchange.axes, tiled=True) for a in choices[:2])
    local = numbers - lax.axis_index(token_exchange.axes) * experts.number
    name, backend = experts.options["checkpoint_name"], experts.options["backend"]
    routing = arrange(local, weights, experts.number, rows=rows, checkpoint_name=name, backend=backend)
    parts, state = experts.routed(everywhere(x, token_exchange), routing)
    chosen = jnp.sum((local >= 0) & (local < experts.number), dtype=jnp.int32)
    return home(parts, token_exchange), chosen - end_of(routing.group_sizes), state


def _ragged(
    x: Array, choices: Choices, experts: LocalExperts, token_exchange: TokenExchange, rows: int
) -> tuple[Array, Array, States | None]:
    everyone = lax.axis_size(token_exchange.axes) * experts.number
    backend = experts.options["backend"]
    routing = arranged(choices.experts, choices.weights, everyone, experts.options["checkpoint_name"], backend)
    where, here = slices(routing.group_sizes, token_exchange.axes, rows), len(routing.order)
    probs = None
    if experts.weights_on == "activation":
        bare = TokenExchange.of(token_exchange.axes, None, None)
        probs = away(row_weights(routing)[:, None], where, bare, here, rows)[:, 0]
    landed = away(permute(x, routing, backend=backend), where, token_exchange, here, rows)
    results, state = experts.grouped(landed, where.group_sizes, probs)
    returned = back(results, where, token_exchange, here, rows)
    y = combine(returned, routing, weighted=probs is None, preferred_element_type=experts.out_dtype, backend=backend)
    return y, where.dropped, state
