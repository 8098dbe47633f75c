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
from octavo_jax.moe.payload import move_with_payload

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


def exchange_slices(sizes: Array, axes: tuple[str, ...], rows: int) -> Slices:
    """The slices of this device's part in the exchange, from `sizes` [E], the rows that this one has for each expert.

    rows   that fit on each device; what would land past them stays at home
    """
    devices, me = lax.axis_size(axes), lax.axis_index(axes)
    experts = len(sizes) // devices
    table = lax.all_gather(sizes, axes).reshape(devices, devices, experts)  # [source, owner, expert]
    # Rows of an owner by (expert, source): limited to those that fit, then where each slice starts.
    landing = jnp.transpose(table, (1, 2, 0)).reshape(devices, -1)
    landing = jax.vmap(partial(limited, rows=rows))(landing)
    starts = _starts(landing).reshape(devices, experts, devices)
    fits = landing.reshape(devices, experts, devices)
    leaving = _starts(table.reshape(devices, -1)).reshape(devices, devices, experts)
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
def send_rows(rows: Array, slices: Slices, token_exchange: TokenExchange, out_rows: int, in_rows: int) -> Array:
    """rows [out_rows, K], sorted by expert, to [in_rows, K] of the experts on this device; other rows are zeros.

    Its gradient comes back as by `return_rows`, without a payload.
    """
    return _send(rows, slices, token_exchange, "x", in_rows)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def return_rows(rows: Array, slices: Slices, token_exchange: TokenExchange, out_rows: int, in_rows: int) -> Array:
    """Rows [in_rows, N] of the experts on this device back to where they came from, [out_rows, N]; dropped ones are 0.

    Its gradient goes out as by `send_rows`, quantized as a gradient where there is a payload.
    """
    return _return(rows, slices, token_exchange, out_rows)


def _send(rows: Array, slices: Slices, token_exchange: TokenExchange, operand: Operand, in_rows: int) -> Array:
    end = (slices.out_start[-1:] + slices.out_size[-1:]).astype(jnp.int32)
    slots = slices.out_start, slices.out_size, slices.out_landing, slices.in_size
    move = partial(_exchange, slots=slots, axes=token_exchange.axes, rows=in_rows)
    return move_with_payload(rows, end, move, token_exchange.payload, operand, token_exchange.backend)


def _return(rows: Array, slices: Slices, token_exchange: TokenExchange, out_rows: int) -> Array:
    slots = slices.in_start, slices.in_size, slices.in_landing, slices.out_size
    return _exchange(rows, slots, token_exchange.axes, out_rows)


def _exchange(x: Array, slots: tuple[Array, ...], axes: tuple[str, ...], rows: int) -> Array:
    empty = jnp.zeros((rows, *x.shape[1:]), x.dtype)
    return exchange_rows(x, varying_alike((x, empty))[1], *slots, axis_name=axes)


def _send_rows_fwd(
    rows: Array, slices: Slices, token_exchange: TokenExchange, out_rows: int, in_rows: int
) -> tuple[Array, Slices]:
    return _send(rows, slices, token_exchange, "x", in_rows), slices


def _send_rows_bwd(
    token_exchange: TokenExchange, out_rows: int, in_rows: int, slices: Slices, drows: Array
) -> tuple[Array, None]:
    return _return(drows, slices, token_exchange, out_rows), None


send_rows.defvjp(_send_rows_fwd, _send_rows_bwd)


def _return_rows_fwd(
    rows: Array, slices: Slices, token_exchange: TokenExchange, out_rows: int, in_rows: int
) -> tuple[Array, Slices]:
    return _return(rows, slices, token_exchange, out_rows), slices


def _return_rows_bwd(
    token_exchange: TokenExchange, out_rows: int, in_rows: int, slices: Slices, drows: Array
) -> tuple[Array, None]:
    return _send(drows, slices, token_exchange, "dy", in_rows), None


return_rows.defvjp(_return_rows_fwd, _return_rows_bwd)
