"""Experts that are spread over the devices of mesh axes: what each device runs, inside a manual region.

With T tokens per device, D devices and G experts on each, device d holds the experts d * G to d * G + G - 1. Rows of an
expert are in the order of the devices and, within one, of their tokens: as on one device that holds all tokens. So
what is quantized of them is the same to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from octavo_jax.arrays.recipes import as_recipe
from octavo_jax.arrays.sizes import end_of
from octavo_jax.dispatch.device import device_of
from octavo_jax.mlp.mlp import States
from octavo_jax.moe.arrangement import arrange, arrange_checked
from octavo_jax.moe.exchange import Exchange, TokenExchange, Way, all_gather_tokens, reduce_scatter_sums
from octavo_jax.moe.experts import LocalExperts, check_experts
from octavo_jax.moe.permutation import combine, permute, row_weights
from octavo_jax.moe.ragged_exchange import exchange_slices, return_rows, send_rows
from octavo_jax.moe.routing import RouterOutput

WITHOUT_RAGGED_ALL_TO_ALL = ("cpu",)
"""Platforms whose XLA lacks this collective."""


class SpreadResult(NamedTuple):
    """What experts that are spread over devices return on each of them.

    y         [T, N] of this device's tokens
    dropped   choices of these tokens, or rows of these experts, that were dropped
    state     delayed scaling's new states; None without a state
    """

    y: Array
    dropped: Array
    state: States | None


def chosen_way(exchange: Exchange, k: int, devices: int, platform: str) -> Way:
    """The way of an exchange among `devices` of a platform; ValueError where the platform lacks it."""
    if exchange.way == "ragged" and platform in WITHOUT_RAGGED_ALL_TO_ALL:
        raise ValueError("way is 'ragged' and XLA:CPU has no ragged_all_to_all; use 'gather', or None for what fits")
    if exchange.way is not None:
        return exchange.way
    return "ragged" if platform not in WITHOUT_RAGGED_ALL_TO_ALL and k < devices else "gather"


def spread_mlp(
    x: Array, choices: RouterOutput, experts: LocalExperts, axes: tuple[str, ...], exchange: Exchange
) -> SpreadResult:
    """This device's tokens through the experts of all devices.

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
    token_exchange = TokenExchange.of(axes, as_recipe(exchange.payload), experts.options.backend)
    way = chosen_way(exchange, k, devices, device_of(x).kind)
    run = _by_gather if way == "gather" else _by_ragged_exchange
    return run(x, choices, experts, token_exchange, rows)


def _by_gather(
    x: Array, choices: RouterOutput, experts: LocalExperts, token_exchange: TokenExchange, rows: int
) -> SpreadResult:
    numbers, weights = (lax.all_gather(a, token_exchange.axes, tiled=True) for a in choices[:2])
    local = numbers - lax.axis_index(token_exchange.axes) * experts.number
    name, backend = experts.options.checkpoint_name, experts.options.backend
    routing = arrange(local, weights, experts.number, rows=rows, checkpoint_name=name, backend=backend)
    partial_sums, state = experts.routed(all_gather_tokens(x, token_exchange), routing)
    chosen = jnp.sum((local >= 0) & (local < experts.number), dtype=jnp.int32)
    y = reduce_scatter_sums(partial_sums, token_exchange)
    return SpreadResult(y, chosen - end_of(routing.group_sizes), state)


def _by_ragged_exchange(
    x: Array, choices: RouterOutput, experts: LocalExperts, token_exchange: TokenExchange, rows: int
) -> SpreadResult:
    all_experts = lax.axis_size(token_exchange.axes) * experts.number
    name, backend = experts.options.checkpoint_name, experts.options.backend
    routing = arrange_checked(choices.experts, choices.weights, all_experts, name, backend)
    slices, out_rows = exchange_slices(routing.group_sizes, token_exchange.axes, rows), len(routing.order)
    probs = None
    if experts.weights_on == "activation":
        without_payload = TokenExchange.of(token_exchange.axes, None, None)
        probs = send_rows(row_weights(routing)[:, None], slices, without_payload, out_rows, rows)[:, 0]
    received = send_rows(permute(x, routing, backend=backend), slices, token_exchange, out_rows, rows)
    results, state = experts.grouped(received, slices.group_sizes, probs)
    returned = return_rows(results, slices, token_exchange, out_rows, rows)
    y = combine(returned, routing, weighted=probs is None, preferred_element_type=experts.out_dtype, backend=backend)
    return SpreadResult(y, slices.dropped, state)
