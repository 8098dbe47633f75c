"""Rows by expert and back. Both directions and both gradients are gathers, so nothing depends on an order of sums."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from octavo_jax.arithmetic.barrier import barrier
from octavo_jax.arithmetic.widening import in_dtype, in_fp32
from octavo_jax.arrays.checks import check_arrays
from octavo_jax.arrays.dtypes import dtype_name, element_type
from octavo_jax.arrays.numpy_arrays import as_jax
from octavo_jax.arrays.sizes import end_of
from octavo_jax.arrays.varying import varying_alike
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.functions.forward_mode import refuse_forward_mode
from octavo_jax.linear.arguments import as_array
from octavo_jax.moe.arrangement import Routing, check_routing
from octavo_jax.moe.row_functions import COMPOSED, DeviceAndBackends, RowFunctions, row_functions_for
from octavo_jax.sharding.conflicts import check_whole


def permute(x: Array, routing: Routing, *, backend: BackendNames = None) -> Array:
    """x [T, ...] to rows [R, ...]: each token's values once for each of its choices, sorted by expert.

    backend   which backends may sum gradients, as in `octavo_jax.grouped_dense`; JAX's operations do where none can,
              and where several devices of a mesh may hold parts of an array

    Rows past the sum of the sizes hold tokens that are left out; grouped layers do not read them. The gradient of a
    token is the sum over its choices in float32, rounded once; rows past the sum are not read.
    """
    check_arrays(x=x)
    x = as_array("x", x)
    check_routing(routing)
    check_tokens(x, routing)
    check_whole("permute", leading=1, x=x)
    arrays = x, routing.order, routing.position, end_of(routing.group_sizes)
    functions = row_functions_for(x.dtype, DeviceAndBackends.of(x, backend)) if x.ndim == 2 else COMPOSED
    rows: Array = _permuted(*refuse_forward_mode("permute", varying_alike(as_jax(arrays))), functions)
    return rows


def row_weights(routing: Routing) -> Array:
    """[R] float32, the weight of the choice in each row: `probs` of `octavo_jax.grouped_mlp`."""
    check_routing(routing)
    arrays = routing.weights, routing.order, routing.position, end_of(routing.group_sizes)
    weights: Array = _ordered(*refuse_forward_mode("row_weights", varying_alike(as_jax(arrays))))
    return weights


def combine(
    rows: Array,
    routing: Routing,
    *,
    weighted: bool = True,
    preferred_element_type: DTypeLike | None = None,
    backend: BackendNames = None,
) -> Array:
    """rows [R, N] to y [T, N]: the sum over a token's choices of weight * row, in float32, rounded once.

    weighted                 False takes 1 for each weight, for rows that `row_weights` has multiplied before
    preferred_element_type   dtype of y; None: that of rows
    backend                  which backends may sum rows, as in `permute`

    Rows past the sum of the sizes are not read, and a token that is left out gets zeros. Differentiable in rows and in
    `routing.weights`.
    """
    check_arrays(rows=rows)
    rows = as_array("rows", rows)
    check_routing(routing)
    if rows.ndim != 2:
        raise ValueError(f"rows has shape {list(rows.shape)}; it is [R, N], one row per choice")
    _check_first(rows, routing.order.shape[0], "rows", "one row per choice")
    dtype_name(rows.dtype, "rows")
    check_whole("combine", leading=1, rows=rows)
    arrays = rows, routing.weights, routing.order, routing.position, end_of(routing.group_sizes)
    rows, weights, *where = refuse_forward_mode("combine", varying_alike(as_jax(arrays)))
    dtype = element_type(preferred_element_type, rows.dtype)
    functions = row_functions_for(rows.dtype, DeviceAndBackends.of(rows, backend))
    y: Array = (
        _combined(rows, weights, *where, dtype, functions) if weighted else _summed(rows, *where, dtype, functions)
    )
    return y


def check_tokens(x: Array, routing: Routing) -> None:
    """ValueError unless x [T, ...] has as many tokens as the routing."""
    _check_first(x, routing.position.shape[0], "x", "one row per token")


def _check_first(x: Array, needed: int, name: str, what: str) -> None:
    if x.ndim == 0 or x.shape[0] != needed:
        raise ValueError(f"{name} has shape {list(x.shape)} and the routing needs {needed} on the first axis, {what}")


def _taken(x: Array, indices: Array) -> Array:
    return x.at[indices].get(mode="promise_in_bounds")


def row_of(x: Array, position: Array, end: Array) -> Array:
    """float32 x[position], 0 where the position is past the end, whatever x has there."""
    inside = position < end
    # Row 0 stands for what is left out: most choices, where experts are spread; it is then read from cache.
    rows = in_fp32(_taken(x, jnp.where(inside, position, 0)))
    return jnp.where(inside.reshape(position.shape + (1,) * (rows.ndim - position.ndim)), rows, np.float32(0))


def sum_of_choices(rows: Array, position: Array, end: Array, dtype: DTypeLike, functions: RowFunctions) -> Array:
    """[T, ...]: the rows of each token's choices, summed in their order in fp32 and rounded once to `dtype`."""
    if functions.combine_rows is not None and dtype == rows.dtype:
        return functions.combine_rows(rows, position, position < end, None)
    total: Array = _sum_of_choices(rows, position, end, dtype=dtype)
    return total


def weighted_sum(
    rows: Array, weights: Array, position: Array, end: Array, dtype: DTypeLike, functions: RowFunctions
) -> Array:
    """`sum_of_choices` of weights [T, k] times rows [R, N]."""
    if functions.combine_rows is not None and dtype == rows.dtype:
        return functions.combine_rows(rows, position, position < end, weights)
    total: Array = _weighted_sum(rows, weights, position, end, dtype=dtype)
    return total


# Barriers, and one compiled call for eager users: what is before and after would change last bits from one program to
# the next, because compilers contract products with sums.
@partial(jax.jit, static_argnames="dtype")
def _sum_of_choices(rows: Array, position: Array, end: Array, *, dtype: DTypeLike) -> Array:
    """One gather per choice and a fixed order of sums, which a reduction would be free to choose."""
    (rows,) = barrier(rows)
    parts = [row_of(rows, position[:, j], end) for j in range(position.shape[1])]
    (total,) = barrier(sum(parts[1:], start=parts[0]).astype(dtype))
    return total


@partial(jax.jit, static_argnames="dtype")
def _weighted_sum(rows: Array, weights: Array, position: Array, end: Array, *, dtype: DTypeLike) -> Array:
    rows, weights = barrier(rows, weights)
    parts = [weights[:, j, None] * row_of(rows, position[:, j], end) for j in range(position.shape[1])]
    (total,) = barrier(sum(parts[1:], start=parts[0]).astype(dtype))
    return total


def rows_of_tokens(x: Array, order: Array, position: Array) -> Array:
    """[R, ...]: each row gets its token's entry of x."""
    return _taken(x, order // position.shape[1])


def _inside(rows: Array, end: Array) -> Array:
    """rows with zeros past the end."""
    index = jnp.arange(len(rows), dtype=jnp.int32).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(index < end, rows, jnp.zeros((), rows.dtype))


class PermutationResiduals(NamedTuple):
    """What the gradients read; `like` has no entries and the argument's dtype."""

    order: Array
    position: Array
    end: Array
    like: Array
    rows: Array | None = None
    weights: Array | None = None


def _like(x: Array) -> Array:
    return jnp.zeros(0, x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _permuted(x: Array, order: Array, position: Array, end: Array, functions: RowFunctions) -> Array:
    return rows_of_tokens(x, order, position)


def _permuted_forward(
    x: Array, order: Array, position: Array, end: Array, functions: RowFunctions
) -> tuple[Array, PermutationResiduals]:
    return rows_of_tokens(x, order, position), PermutationResiduals(order, position, end, _like(x))


def _permuted_backward(functions: RowFunctions, saved: PermutationResiduals, drows: Array) -> tuple[Array | None, ...]:
    return sum_of_choices(drows, saved.position, saved.end, saved.like.dtype, functions), None, None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _summed(rows: Array, order: Array, position: Array, end: Array, dtype: DTypeLike, functions: RowFunctions) -> Array:
    return sum_of_choices(rows, position, end, dtype, functions)


def _summed_forward(
    rows: Array, order: Array, position: Array, end: Array, dtype: DTypeLike, functions: RowFunctions
) -> tuple[Array, PermutationResiduals]:
    return _summed(rows, order, position, end, dtype, functions), PermutationResiduals(
        order, position, end, _like(rows)
    )


def rows_gradient(saved: PermutationResiduals, dy: Array) -> Array:
    """drows [R, N] in the rows' dtype of `sum_of_choices`, from dy."""
    of_rows = rows_of_tokens(dy, saved.order, saved.position)
    return in_dtype(_inside(of_rows, saved.end), saved.like.dtype)


def _summed_backward(
    dtype: DTypeLike, functions: RowFunctions, saved: PermutationResiduals, dy: Array
) -> tuple[Array | None, ...]:
    return rows_gradient(saved, dy), None, None, None


_summed.defvjp(_summed_forward, _summed_backward)


def weights_by_row(weights: Array, order: Array) -> Array:
    """[R] of weights [T, k]."""
    return _taken(weights.reshape(-1), order)


@jax.custom_vjp
def _ordered(weights: Array, order: Array, position: Array, end: Array) -> Array:
    return weights_by_row(weights, order)


def _ordered_forward(weights: Array, order: Array, position: Array, end: Array) -> tuple[Array, PermutationResiduals]:
    return _ordered(weights, order, position, end), PermutationResiduals(order, position, end, _like(weights))


def _ordered_backward(saved: PermutationResiduals, dweights: Array) -> tuple[Array | None, ...]:
    return row_of(dweights, saved.position, saved.end), None, None, None


_ordered.defvjp(_ordered_forward, _ordered_backward)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _combined(
    rows: Array, weights: Array, order: Array, position: Array, end: Array, dtype: DTypeLike, functions: RowFunctions
) -> Array:
    return weighted_sum(rows, weights, position, end, dtype, functions)


def _combined_forward(
    rows: Array, weights: Array, order: Array, position: Array, end: Array, dtype: DTypeLike, functions: RowFunctions
) -> tuple[Array, PermutationResiduals]:
    saved = PermutationResiduals(order, position, end, _like(rows), rows, weights)
    return _combined(rows, weights, order, position, end, dtype, functions), saved


def weighted_gradients(saved: PermutationResiduals, dy: Array, functions: RowFunctions) -> tuple[Array, Array]:
    """(drows [R, N] in the rows' dtype, dweights [T, k]) of `weighted_sum`, from dy."""
    order, position, rows = saved.order, saved.position, saved.rows
    whole = len(order) == position.size  # else a backend leaves some rows as they were, and these are read
    if functions.permute_rows is None or functions.dot_rows is None or dy.dtype != saved.like.dtype or not whole:
        composed: tuple[Array, Array] = _weighted_gradients(saved, dy)
        return composed
    assert rows is not None
    routed = position < saved.end
    drows = functions.permute_rows(dy, order, position, routed, saved.weights)
    return drows, functions.dot_rows(rows, dy, position, routed)


@jax.jit
def _weighted_gradients(saved: PermutationResiduals, dy: Array) -> tuple[Array, Array]:
    assert saved.rows is not None
    assert saved.weights is not None
    rows, weights, dy = barrier(saved.rows, saved.weights, dy)
    share = weights_by_row(weights, saved.order)[:, None]
    of_rows = in_fp32(rows_of_tokens(dy, saved.order, saved.position))
    drows = _inside(share * of_rows, saved.end)
    # By row, not by choice: where experts are spread there are fewer rows here.
    products = jnp.sum(in_fp32(rows) * of_rows, axis=-1)
    drows, dweights = barrier(drows.astype(saved.like.dtype), row_of(products, saved.position, saved.end))
    return drows, dweights


def _combined_backward(
    dtype: DTypeLike, functions: RowFunctions, saved: PermutationResiduals, dy: Array
) -> tuple[Array | None, ...]:
    return *weighted_gradients(saved, dy, functions), None, None, None


_combined.defvjp(_combined_forward, _combined_backward)
