"""The three grouped GEMMs: operands dequantized, multiplied in fp32, rounded once to the result's dtype.

`Fprop`, `Dgrad` and `Wgrad` are what Octavo calls; the functions below them are what JAX compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from octavo.quantizer import Direction
from octavo_jax.plugin_api import GroupedTensor

ROWS_BY_ROWS = lax.RaggedDotDimensionNumbers(  # type: ignore[no-untyped-call]
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
)
"""[M, N] and [M, K], summed over the rows of each group: [G, N, K]."""


class Fprop:
    """y[r] = x[r] @ w[g].T + bias[g] (times bias_scales[r] where given); rows past the sum are zero."""

    def __init__(self, compiled: Callable[..., Array]) -> None:
        self._compiled = compiled

    def __call__(
        self,
        x: GroupedTensor,
        w: GroupedTensor,
        group_sizes: Array,
        /,
        *,
        bias: Array | None = None,
        bias_scales: Array | None = None,
        out: Array | None = None,
    ) -> Array:
        """y [M, N]."""
        _no_out(out)
        return self._compiled(x, w, group_sizes, bias, bias_scales)


class Dgrad:
    """dx[r] = dy[r] @ w[g]; rows past the sum are zero."""

    def __init__(self, compiled: Callable[..., Array]) -> None:
        self._compiled = compiled

    def __call__(
        self, dy: GroupedTensor, w: GroupedTensor, group_sizes: Array, /, *, out: Array | None = None
    ) -> Array:
        """dx [M, K]."""
        _no_out(out)
        return self._compiled(dy, w, group_sizes)


class Wgrad:
    """dw[g] = dy_g.T @ x_g, or `out` plus that; a group without rows has zeros, or leaves `out` as it was."""

    def __init__(self, compiled: Callable[..., Array]) -> None:
        self._compiled = compiled

    def __call__(
        self,
        x: GroupedTensor,
        dy: GroupedTensor,
        group_sizes: Array,
        /,
        *,
        out: Array | None = None,
        accumulate: bool = False,
    ) -> Array:
        """dw [G, N, K]."""
        if accumulate != (out is not None):
            raise ValueError(
                f"accumulate is {accumulate} and out is {out!r}; give both (the sum is returned) or neither"
            )
        return self._compiled(x, dy, group_sizes, out)


def fprop(
    out_dtype: Any, x: GroupedTensor, w: GroupedTensor, group_sizes: Array, bias: Array | None, scales: Array | None
) -> Array:
    """See `Fprop`."""
    sizes, row_group = _groups(group_sizes, x.spec.shape[0])
    y = _rows_times(_values(x, "rowwise"), jnp.swapaxes(_values(w, "rowwise"), 1, 2), row_group)
    if bias is not None:
        added = bias.astype(jnp.float32)[jnp.minimum(row_group, len(bias) - 1)]
        y += added if scales is None else added * scales.astype(jnp.float32)[:, None]
    return _without_tail(y, row_group, sizes).astype(out_dtype)


def dgrad(out_dtype: Any, dy: GroupedTensor, w: GroupedTensor, group_sizes: Array) -> Array:
    """See `Dgrad`."""
    _, row_group = _groups(group_sizes, dy.spec.shape[0])
    return _rows_times(_values(dy, "rowwise"), _values(w, "columnwise"), row_group).astype(out_dtype)


def wgrad(out_dtype: Any, x: GroupedTensor, dy: GroupedTensor, group_sizes: Array, out: Array | None) -> Array:
    """See `Wgrad`."""
    sizes, row_group = _groups(group_sizes, x.spec.shape[0])
    left = _without_tail(_values(dy, "columnwise"), row_group, sizes)
    right = _without_tail(_values(x, "columnwise"), row_group, sizes)
    dw = lax.ragged_dot_general(left, right, sizes, ROWS_BY_ROWS, precision=lax.Precision.HIGHEST)
    dw = jnp.where((sizes > 0)[:, None, None], dw, 0)
    if out is None:
        return dw.astype(out_dtype)
    return jnp.where((sizes > 0)[:, None, None], (out.astype(jnp.float32) + dw).astype(out.dtype), out)


def _rows_times(rows: Array, matrices: Array, row_group: Array) -> Array:
    """fp32 [M, C]: each row times its group's matrix [G, K, C], and zeros in the tail, which may hold anything.

    On a CPU `lax.ragged_dot` adds the products of other groups, times zero: a NaN in one matrix would be in every row.
    """

    def write(group: int | Array, y: Array | float) -> Array:
        product = jnp.matmul(rows, matrices[group], precision=lax.Precision.HIGHEST)
        return jnp.where((row_group == group)[:, None], product, y)

    y: Array = lax.fori_loop(1, len(matrices), write, write(0, 0.0))
    return y


def _groups(group_sizes: Array, rows: int) -> tuple[Array, Array]:
    """int32 sizes that fit into `rows` whatever they were, and each row's group; G for rows of the tail."""
    sizes = jnp.clip(group_sizes, 0, rows).astype(jnp.int32)
    ends = jnp.minimum(jnp.cumsum(sizes), rows)
    ends = lax.cummax(jnp.where(ends < 0, rows, ends))
    starts = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends[:-1]])
    return ends - starts, jnp.searchsorted(ends, jnp.arange(rows), side="right")


def _without_tail(rows: Array, row_group: Array, sizes: Array) -> Array:
    return jnp.where((row_group < len(sizes))[:, None], rows, 0)


def _values(operand: GroupedTensor, direction: Direction) -> Array:
    """fp32 values of one plane: each code times the decode scale that it belongs to."""
    codes, scale, _ = operand.plane(direction)
    stacked = len(operand.spec.shape) == 3
    if operand.spec.quantizer.scaling == "current":
        each = scale[:, None, None] if stacked else _of_rows(operand, scale[:, None])
    elif direction == "rowwise":
        each = scale[..., None]
    else:
        each = scale[:, None, :] if stacked else _of_rows(operand, scale)
    return codes.astype(jnp.float32) * each


def _of_rows(operand: GroupedTensor, by_group: Array) -> Array:
    """[G, C] as [M, C]: what belongs to the group of each row. A row of the tail gets the last group's."""
    assert operand.group_sizes is not None
    _, row_group = _groups(operand.group_sizes, operand.spec.shape[0])
    return by_group[jnp.minimum(row_group, len(by_group) - 1)]


def _no_out(out: Array | None) -> None:
    if out is not None:
        raise ValueError("out was given; JAX arrays are immutable, so take the returned array instead")
