"""Rows by expert and back. Both directions and both gradients are gathers, so nothing depends on an order of sums."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from octavo_jax.moe.arrangement import Routing


def permute(x: Array, routing: Routing) -> Array:
    """x [T, ...] to rows [R, ...]: each token's values once for each of its choices, sorted by expert.

    Rows past the sum of the sizes hold tokens that are left out; grouped layers do not read them. The gradient of a
    token is the sum over its choices in float32, rounded once; rows past the sum are not read.
    """
    _check_first(x, routing.position.shape[0], "x", "one row per token")
    rows: Array = _permuted(x, routing.order, routing.position, jnp.sum(routing.group_sizes))
    return rows


def row_weights(routing: Routing) -> Array:
    """[R] float32, the weight of the choice in each row: `probs` of `octavo_jax.grouped_mlp`."""
    weights: Array = _ordered(routing.weights, routing.order, routing.position, jnp.sum(routing.group_sizes))
    return weights


def combine(
    rows: Array, routing: Routing, *, weighted: bool = True, preferred_element_type: DTypeLike | None = None
) -> Array:
    """rows [R, N] to y [T, N]: the sum over a token's choices of weight * row, in float32, rounded once.

    weighted                 False takes 1 for each weight, for rows that `row_weights` has multiplied before
    preferred_element_type   dtype of y; None: that of rows

    Rows past the sum of the sizes are not read, and a token that is left out gets zeros. Differentiable in rows and in
    `routing.weights`.
    """
    if rows.ndim != 2:
        raise ValueError(f"rows has shape {list(rows.shape)}; it is [R, N], one row a choice")
    _check_first(rows, routing.order.shape[0], "rows", "one row a choice")
    where = (routing.order, routing.position, jnp.sum(routing.group_sizes))
    y: Array = _combined(rows, routing.weights, *where) if weighted else _summed(rows, *where)
    return y.astype(rows.dtype if preferred_element_type is None else preferred_element_type)


def _check_first(x: Array, needed: int, name: str, what: str) -> None:
    if x.ndim == 0 or x.shape[0] != needed:
        raise ValueError(f"{name} has shape {list(x.shape)} and the routing needs {needed} on the first axis, {what}")


def _taken(x: Array, indices: Array) -> Array:
    return x.at[indices].get(mode="promise_in_bounds")


def _row_of(x: Array, position: Array, end: Array) -> Array:
    """float32 x[position], 0 where the position is past the end, whatever x has there."""
    inside = position < end
    # Row 0 stands for what is left out: most choices, where experts are spread; it is then read from cache.
    rows = _taken(x, jnp.where(inside, position, 0)).astype(jnp.float32)
    return jnp.where(inside.reshape(position.shape + (1,) * (rows.ndim - position.ndim)), rows, np.float32(0))


def _sum_of_choices(rows: Array, position: Array, end: Array) -> Array:
    """float32 [T, ...]: one gather a choice and a fixed order of sums, which a reduction would be free to choose."""
    parts = [_row_of(rows, position[:, j], end) for j in range(position.shape[1])]
    return sum(parts[1:], start=parts[0])


def _token_rows(x: Array, order: Array, position: Array) -> Array:
    """[R, ...]: each row gets its token's entry of x."""
    return _taken(x, order // position.shape[1])


def _inside(rows: Array, end: Array) -> Array:
    """rows with zeros past the end."""
    index = jnp.arange(len(rows), dtype=jnp.int32).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(index < end, rows, jnp.zeros((), rows.dtype))


class _Saved(NamedTuple):
    """What the gradients read; `like` has no entries and the argument's dtype."""

    order: Array
    position: Array
    end: Array
    like: Array
    rows: Array | None = None
    weights: Array | None = None


def _like(x: Array) -> Array:
    return jnp.zeros(0, x.dtype)


@jax.custom_vjp
def _permuted(x: Array, order: Array, position: Array, end: Array) -> Array:
    return _token_rows(x, order, position)


def _permuted_forward(x: Array, order: Array, position: Array, end: Array) -> tuple[Array, _Saved]:
    return _token_rows(x, order, position), _Saved(order, position, end, _like(x))


def _permuted_backward(saved: _Saved, drows: Array) -> tuple[Array | None, ...]:
    return _sum_of_choices(drows, saved.position, saved.end).astype(saved.like.dtype), None, None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


@jax.custom_vjp
def _summed(rows: Array, order: Array, position: Array, end: Array) -> Array:
    return _sum_of_choices(rows, position, end)


def _summed_forward(rows: Array, order: Array, position: Array, end: Array) -> tuple[Array, _Saved]:
    return _sum_of_choices(rows, position, end), _Saved(order, position, end, _like(rows))


def _summed_backward(saved: _Saved, dy: Array) -> tuple[Array | None, ...]:
    drows = _inside(_token_rows(dy, saved.order, saved.position), saved.end)
    return drows.astype(saved.like.dtype), None, None, None


_summed.defvjp(_summed_forward, _summed_backward)


@jax.custom_vjp
def _ordered(weights: Array, order: Array, position: Array, end: Array) -> Array:
    return _taken(weights.reshape(-1), order)


def _ordered_forward(weights: Array, order: Array, position: Array, end: Array) -> tuple[Array, _Saved]:
    return _ordered(weights, order, position, end), _Saved(order, position, end, _like(weights))


def _ordered_backward(saved: _Saved, dweights: Array) -> tuple[Array | None, ...]:
    return _row_of(dweights, saved.position, saved.end), None, None, None


_ordered.defvjp(_ordered_forward, _ordered_backward)


@jax.custom_vjp
def _combined(rows: Array, weights: Array, order: Array, position: Array, end: Array) -> Array:
    parts = [weights[:, j, None] * _row_of(rows, position[:, j], end) for j in range(position.shape[1])]
    return sum(parts[1:], start=parts[0])


def _combined_forward(rows: Array, weights: Array, order: Array, position: Array, end: Array) -> tuple[Array, _Saved]:
    saved = _Saved(order, position, end, _like(rows), rows, weights)
    return _combined(rows, weights, order, position, end), saved


def _combined_backward(saved: _Saved, dy: Array) -> tuple[Array | None, ...]:
    assert saved.rows is not None
    assert saved.weights is not None
    share = _taken(saved.weights.reshape(-1), saved.order)[:, None]
    of_rows = _token_rows(dy, saved.order, saved.position)
    drows = _inside(share * of_rows, saved.end)
    # By row, not by choice: where experts are spread there are fewer rows here.
    products = jnp.sum(saved.rows.astype(jnp.float32) * of_rows, axis=-1)
    dweights = _row_of(products, saved.position, saved.end)
    return drows.astype(saved.like.dtype), dweights, None, None, None


_combined.defvjp(_combined_forward, _combined_backward)
