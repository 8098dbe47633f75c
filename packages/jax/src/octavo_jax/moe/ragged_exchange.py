"""Each choice to the device of its expert and back, by `jax.lax.ragged_all_to_all`.

Rows leave sorted by expert and land sorted by expert, the sources in the axis's order within each: the receiver does
not move them again, and they are ordered as on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from octavo.quantizer import Operand
from octavo_jax.arrays.varying import varying_alike
from octavo_jax.moe.arrangement import limited
from octavo_jax.moe.exchange import TokenExchange
from octavo_jax.moe.payload import sent

exchange_rows: Callable[..., Array] = lax.ragged_all_to_all


class Slices(NamedTuple):
    """Where each slice of rows starts and how long it is, int32, a slice for each pair of a device and an expert of it.

    E = devices * G experts in all, G of them on each device.

    out_start, out_size    [E] of the rows that this device sends, by expert
    out_landing            [E] where they land on the expert's device
    in_start, in_size      [E] of the rows that land here, by (source, expert)
    in_landing             [E] where they are on their source
    group_sizes            [G] rows of each expert here
    dropped                scalar, rows of this device that got no room anywhere
    """

    out_start: Array
    out_size: Array
    out_landing: Array
    in_start: Array
    in_size: Array
    in_landing: Array
    group_sizes: Array
    dropped: Array


def slices(sizes: Array, axes: tuple[str, ...], rows: int) -> Slices:
    """The slices of every device's exchange, from `sizes` [E], the rows that this one has for each expert.

    rows   that fit on each device; what would land past them stays at home
    """
    devices, me = lax.axis_size(axes), lax.axis_index(axes)
    local = len(sizes) // devices
    table = lax.all_gather(sizes, axes).reshape(devices, devices, local)  # [source, owner, expert]
    # Rows of an owner by (expert, source): limited to those that fit, then where each slice starts.
    landing = jnp.transpose(table, (1, 2, 0)).reshape(devices, -1)
    landing = jax.vmap(partial(limited, rows=rows))(landing)
    starts = _starts(landing).reshape(devices, local, devices)
    fits = landing.reshape(devices, local, devices)
    leaving = _starts(table.reshape(devices, -1)).reshape(devices, devices, local)
    return Slices(
        out_start=leaving[me].reshape(-1),
        out_size=fits[:, :, me].reshape(-1),
        out_landing=starts[:, :, me].reshape(-1),
        in_start=starts[me].T.reshape(-1),
        in_size=fits[me].T.reshape(-1),
        in_landing=leaving[:, me].reshape(-1),
        group_sizes=jnp.sum(fits[me], axis=1, dtype=jnp.int32),
        dropped=jnp.sum(sizes, dtype=jnp.int32) - jnp.sum(fits[:, :, me], dtype=jnp.int32),
    )


def _starts(sizes: Array) -> Array:
    """Exclusive sums along the last axis."""
    return jnp.cumsum(sizes, axis=-1) - sizes


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def away(rows: Array, where: Slices, token_exchange: TokenExchange, here: int, there: int) -> Array:
    """rows [here, K], sorted by expert, to [there, K] of the experts on this device; other rows are zeros.

    The gradient comes back by `back`, without a payload.
    """
    return _move_out(rows, where, token_exchange, "x", there)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def back(rows: Array, where: Slices, token_exchange: TokenExchange, here: int, there: int) -> Array:
    """Rows [there, N] of the experts on this device to [here, N] of each device's own; dropped rows are zeros.

    The gradient goes out as `away` does, as a quantized gradient where there is a payload.
    """
    return _move_back(rows, where, token_exchange, here)


def _move_out(rows: Array, where: Slices, token_exchange: TokenExchange, operand: Operand, there: int) -> Array:
    end = (where.out_start[-1:] + where.out_size[-1:]).astype(jnp.int32)
    slots = where.out_start, where.out_size, where.out_landing, where.in_size
    move = partial(_ragged, slots=slots, axes=token_exchange.axes, rows=there)
    return sent(rows, end, move, token_exchange.payload, operand, token_exchange.backend)


def _move_back(rows: Array, where: Slices, token_exchange: TokenExchange, here: int) -> Array:
    slots = where.in_start, where.in_size, where.in_landing, where.out_size
    return _ragged(rows, slots, token_exchange.axes, here)


def _ragged(x: Array, slots: tuple[Array, ...], axes: tuple[str, ...], rows: int) -> Array:
    empty = jnp.zeros((rows, *x.shape[1:]), x.dtype)
    return exchange_rows(x, varying_alike((x, empty))[1], *slots, axis_name=axes)


def _away_forward(
    rows: Array, where: Slices, token_exchange: TokenExchange, here: int, there: int
) -> tuple[Array, Slices]:
    return _move_out(rows, where, token_exchange, "x", there), where


def _away_backward(
    token_exchange: TokenExchange, here: int, there: int, where: Slices, drows: Array
) -> tuple[Array, None]:
    return _move_back(drows, where, token_exchange, here), None


away.defvjp(_away_forward, _away_backward)


def _back_forward(
    rows: Array, where: Slices, token_exchange: TokenExchange, here: int, there: int
) -> tuple[Array, Slices]:
    return _move_back(rows, where, token_exchange, here), where


def _back_backward(
    token_exchange: TokenExchange, here: int, there: int, where: Slices, drows: Array
) -> tuple[Array, None]:
    return _move_out(drows, where, token_exchange, "dy", there), None


back.defvjp(_back_forward, _back_backward)
