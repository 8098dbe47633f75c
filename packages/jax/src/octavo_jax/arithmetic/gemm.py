"""Grouped GEMMs in fp32: fprop and dgrad by panels of rows, wgrad summed panel by panel in row order.

Rows are gathered into panels [P, B, K] that belong to one group each; P = block_bound(M, G, B) is static, so sizes
may be traced. Absent rows are zeros, which is what keeps a NaN in the tail out of every sum.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from octavo_jax.arithmetic.barrier import barrier
from octavo_jax.arithmetic.rows import RaggedRows
from octavo_jax.arithmetic.widening import in_fp32
from octavo_jax.arrays.varying import varying_axes, varying_over

_PRECISION = lax.Precision.HIGHEST


def panel_size(rows: int, groups: int) -> int:
    """Rows of a panel: about half a group's share, so that few rows are padding, and 8 to 128."""
    share = max(rows // (2 * max(groups, 1)), 1)
    return min(max(1 << (share.bit_length() - 1), 8), 128)


def rows_times_matrices(a: Array, matrices: Array, group_sizes: Array, contract: int) -> Array:
    """fp32 [M, C]: row r of group g times matrices[g], contracted with the matrices' axis `contract`; zero tail.

    a [M, K] of matrices [G, N, K] with contract=2, or of matrices [G, K, N] with contract=1: the same bits.
    """
    m = a.shape[0]
    groups = matrices.shape[0]
    rows = RaggedRows(group_sizes, m)
    size = panel_size(m, groups)
    # XLA:CPU sums in an order that depends on which axis of the weight is contracted: [G, K, N] behind a barrier, past
    # which no transpose is folded into the product, is one order for both.
    (weights,) = barrier(in_fp32(matrices if contract == 1 else jnp.swapaxes(matrices, 1, 2)))

    def step(carry: None, panel: tuple[Array, Array]) -> tuple[None, Array]:
        values, group = panel
        weight = lax.dynamic_index_in_dim(weights, group, keepdims=False)
        return carry, lax.dot_general(values, weight, (((1,), (0,)), ((), ())), precision=_PRECISION)

    _, out = lax.scan(step, None, (rows.panels(in_fp32(a), size), rows.block_position(size).group))
    return rows.unpanel(out, size)


def matrices_from_rows(a: Array, b: Array, group_sizes: Array) -> Array:
    """fp32 [G, A, B]: the sum over rows r of group g of outer(a[r], b[r]); exact zeros for a group without rows."""
    groups = group_sizes.shape[0]
    rows = RaggedRows(group_sizes, a.shape[0])
    size = panel_size(a.shape[0], groups)

    def step(total: Array, panel: tuple[Array, Array, Array]) -> tuple[Array, None]:
        left, right, group = panel
        product = lax.dot_general(left, right, (((0,), (0,)), ((), ())), precision=_PRECISION)
        grown = lax.dynamic_index_in_dim(total, group, keepdims=True) + product[None]
        return lax.dynamic_update_index_in_dim(total, grown, group, 0), None

    panels = (rows.panels(in_fp32(a), size), rows.panels(in_fp32(b), size), rows.block_position(size).group)
    zeros = jnp.zeros((groups, a.shape[1], b.shape[1]), jnp.float32)
    total: Array
    total, _ = lax.scan(step, varying_over(zeros, varying_axes(panels)), panels)
    return total


def group_sums(x: Array, group_sizes: Array, scales: Array | None = None) -> Array:
    """fp32 [G, C]: column sums of each group's rows: of each panel, then of the group's panels, in a fixed order.

    scales   fp32 [M] or None: row r counts scales[r] times
    """
    groups = group_sizes.shape[0]
    x = x if scales is None else in_fp32(x) * scales[:, None]
    rows = RaggedRows(group_sizes, x.shape[0])
    size = panel_size(x.shape[0], groups)
    sums = jnp.sum(rows.panels(in_fp32(x), size), axis=1)
    # Masked and not multiplied by 0 and 1: what a group holds, NaN and all, is nothing to the others.
    mine = jnp.arange(groups, dtype=jnp.int32)[:, None] == rows.block_position(size).group[None, :]
    return jnp.sum(jnp.where(mine[..., None], sums[None], 0), axis=1)


def bias_products(dy: Array, bias: Array, group_sizes: Array) -> Array:
    """fp32 [M]: dy[r] . bias[g] for every row r of group g, the gradient of the bias's scales; zero tail."""
    rows = RaggedRows(group_sizes, dy.shape[0])
    return rows.masked(jnp.sum(in_fp32(dy) * rows.from_groups(in_fp32(bias)), axis=-1))


def add_bias(y: Array, bias: Array, group_sizes: Array, bias_scales: Array | None) -> Array:
    """y + bias[g] (times bias_scales[r]) in fp32; the tail stays zero."""
    rows = RaggedRows(group_sizes, y.shape[0])
    each = rows.from_groups(in_fp32(bias))
    if bias_scales is not None:
        each = each * in_fp32(bias_scales)[:, None]
    return rows.masked(y + each)
