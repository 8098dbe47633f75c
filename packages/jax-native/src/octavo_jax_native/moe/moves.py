"""Routing and moved rows: the bound functions of octavo_registry.contract.moves, one call each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from octavo_jax.plugin_api import check_array, check_input
from octavo_jax_native.arrays.words import as_int64
from octavo_jax_native.ffi import router, targets


def route(expert_index: Array, groups: int, /) -> tuple[Array, Array, Array, Array]:
    """Sizes int32 [G], order int32 [T k], position int32 [T, k] and routed bool [T, k] of integers [T, k]."""
    made: tuple[Array, Array, Array, Array] = octavo_route(expert_index, groups)
    return made


@jax.jit(static_argnums=1)
def octavo_route(expert_index: Array, groups: int) -> tuple[Array, Array, Array, Array]:
    shape = expert_index.shape
    sizes, order, position, routed = router.route(as_int64(expert_index.reshape(-1)), expert_index.size, groups)
    return sizes, order, position.reshape(shape), routed.reshape(shape)


def permute_rows(x: Array, order: Array, position: Array, routed: Array, weights: Array | None, /) -> Array:
    """Rows [R, H] of tokens x [T, H], times weights [T, k] where they are given."""
    check_input(x, "x", (2,))
    check_array(position, "position", (x.shape[0], *position.shape[1:]), position.dtype)
    rows: Array = octavo_permute_rows(x, order, position, routed, weights)
    return rows


@jax.jit
def octavo_permute_rows(x: Array, order: Array, position: Array, routed: Array, weights: Array | None) -> Array:
    operands = {"from": x, **_choices(position, routed, weights)}
    return router.row_call(targets.PERMUTE_ROWS, operands, position.shape[1], (order.shape[0], x.shape[1]), x.dtype)


def combine_rows(rows: Array, position: Array, routed: Array, weights: Array | None, /) -> Array:
    """y [T, H], summed over the choices of each token in their order."""
    check_input(rows, "rows", (2,))
    y: Array = octavo_combine_rows(rows, position, routed, weights)
    return y


@jax.jit
def octavo_combine_rows(rows: Array, position: Array, routed: Array, weights: Array | None) -> Array:
    operands = {"from": rows, **_choices(position, routed, weights)}
    tokens, choices = position.shape
    return router.row_call(targets.COMBINE_ROWS, operands, choices, (tokens, rows.shape[1]), rows.dtype)


def dot_rows(rows: Array, dy: Array, position: Array, routed: Array, /) -> Array:
    """fp32 [T, k]: each choice's row times its token's dy."""
    check_input(rows, "rows", (2,))
    check_array(dy, "dy", (position.shape[0], rows.shape[1]), rows.dtype)
    products: Array = octavo_dot_rows(rows, dy, position, routed)
    return products


@jax.jit
def octavo_dot_rows(rows: Array, dy: Array, position: Array, routed: Array) -> Array:
    operands = {"rows": rows, "dy": dy, **_choices(position, routed, None)}
    return router.row_call(targets.DOT_ROWS, operands, position.shape[1], position.shape, jnp.float32)


def _choices(position: Array, routed: Array, weights: Array | None) -> dict[str, Array]:
    more = {} if weights is None else {"weights": weights}
    return {"position": as_int64(position.reshape(-1)), "routed": routed.reshape(-1), **more}
