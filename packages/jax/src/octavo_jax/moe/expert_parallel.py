"""Experts that are spread over the devices of mesh axes: what each device runs, inside a manual region.

With T tokens a device, D devices and G experts on each, device d holds the experts d * G to d * G + G - 1. Rows of an
expert stand in the order of the devices and, within one, of their tokens: as on one device that holds all tokens. So
what is quantized of them is the same to the bit.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from octavo_jax.dispatch.layer import device_of
from octavo_jax.mlp.mlp import grouped_mlp
from octavo_jax.moe.arrangement import arrange, arranged
from octavo_jax.moe.exchange import Exchange, Journey, Way, everywhere, home
from octavo_jax.moe.experts import WeightsOn, check_experts, routed_mlp
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
    x: Array,
    choices: Choices,
    wi: Array,
    wo: Array,
    *,
    axes: tuple[str, ...],
    exchange: Exchange,
    weights_on: WeightsOn,
    preferred_element_type: DTypeLike,
    **options: Any,
) -> tuple[Array, Array, Any]:
    """(y [T, N], choices of these tokens or rows of these experts that were dropped, new state or None).

    x         [T, K], this device's tokens
    choices   theirs, among all D * G experts
    wi, wo    [G, K, C] and [G, F, N], this device's experts
    axes      over which the experts are spread, manual ones
    options   of `octavo_jax.grouped_mlp`
    """
    check_experts(x, weights_on, options["bo"])
    devices, local = lax.axis_size(axes), wi.shape[0]
    (tokens, k), backend = choices.experts.shape, options["backend"]
    most = devices * tokens * min(k, local)
    rows = most if exchange.rows is None else min(exchange.rows, most)
    journey = Journey.of(axes, exchange.payload, backend)
    run = _gathered if chosen_way(exchange, k, devices, device_of(x)[0]) == "gather" else _ragged
    return run(x, choices, wi, wo, journey, rows, weights_on, preferred_element_type, options)


def _gathered(
    x: Array,
    choices: Choices,
    wi: Array,
    wo: Array,
    journey: Journey,
    rows: int,
    weights_on: WeightsOn,
    dtype: DTypeLike,
    options: dict[str, Any],
) -> tuple[Array, Array, Any]:
    experts, weights = (lax.all_gather(a, journey.axes, tiled=True) for a in choices[:2])
    mine = experts - lax.axis_index(journey.axes) * wi.shape[0]
    routing = arrange(mine, weights, wi.shape[0], rows=rows, checkpoint_name=options["checkpoint_name"])
    result = routed_mlp(
        everywhere(x, journey), routing, wi, wo, weights_on=weights_on, preferred_element_type=dtype, **options
    )
    parts, state = (result, None) if options["state"] is None else result
    asked = jnp.sum((mine >= 0) & (mine < wi.shape[0]), dtype=jnp.int32)
    return home(parts, journey), asked - jnp.sum(routing.group_sizes), state


def _ragged(
    x: Array,
    choices: Choices,
    wi: Array,
    wo: Array,
    journey: Journey,
    rows: int,
    weights_on: WeightsOn,
    dtype: DTypeLike,
    options: dict[str, Any],
) -> tuple[Array, Array, Any]:
    experts = lax.axis_size(journey.axes) * wi.shape[0]
    routing = arranged(choices.experts, choices.weights, experts, options["checkpoint_name"])
    where, here = slices(routing.group_sizes, journey.axes, rows), len(routing.order)
    probs = None
    if weights_on == "activation":
        bare = Journey.of(journey.axes, None, None)
        probs = away(row_weights(routing)[:, None], where, bare, here, rows)[:, 0]
    landed = away(permute(x, routing), where, journey, here, rows)
    result = grouped_mlp(landed, wi, wo, where.group_sizes, probs=probs, **options)
    made, state = (result, None) if options["state"] is None else result
    returned = back(made, where, journey, here, rows)
    y = combine(returned, routing, weighted=probs is None, preferred_element_type=dtype)
    return y, where.dropped, state
