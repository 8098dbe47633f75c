"""The arguments of `dense` and `layernorm_dense`: checked, and arranged as those of a layer with one group."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo_jax.arrays.axes import ContractingDims, DenseAxes, dense_axes
from octavo_jax.arrays.dtypes import dtype_name
from octavo_jax.dispatch.layer import Layer, LayerOptions, layer_for
from octavo_jax.linear.arguments import as_array, check_state
from octavo_jax.scaling.delayed_state import DelayedState
from octavo_jax.sharding.axes import MeshAxes
from octavo_jax.sharding.conflicts import check_shards
from octavo_jax.sharding.explicit_placement import placed_state
from octavo_jax.sharding.manual_sums import on_first_shard, partial_sum_axes
from octavo_jax.sharding.one_matrix import (
    as_row,
    as_stack,
    gathered_shards,
    in_blocks,
    matrix_placement,
    sizes_of_one_group,
)
from octavo_jax.sharding.placement import Placement


class DenseOperands(NamedTuple):
    """The layer, and its operands as one group: x [M, K], kernel [1, K, N] or [1, N, K], bias [1, N], and the sizes; in
    data blocks [F, M / F, K] where a mesh cuts x.

    partial_sum_axes   the caller's manual mesh axes over which y is a partial sum, of float32; one part has the bias
    """

    axes: DenseAxes
    layer: Layer
    placement: Placement | None
    x: Array
    kernel: Array
    bias: Array | None
    state: DelayedState | None
    group_sizes: Array
    partial_sum_axes: tuple[str, ...]


def dense_operands(
    function: str,
    options: LayerOptions,
    x: Array,
    kernel: Array | np.ndarray,
    bias: Array | np.ndarray | None,
    state: DelayedState | None,
    contracting_dims: ContractingDims,
    sharding: MeshAxes | None,
) -> DenseOperands:
    """The arguments of `octavo_jax.dense`, checked: ValueError where they do not go together.

    function   the public function that was called
    """
    kernel = as_array("kernel", kernel)
    placement = matrix_placement(function, sharding, x, kernel, kernel=kernel, bias=bias, state=state)
    axes = dense_axes(contracting_dims, x.shape, kernel.shape, gathered_shards(placement))
    if 0 in kernel.shape:
        raise ValueError(f"kernel has shape {list(kernel.shape)}; every axis is one or more")
    bias = None if bias is None else as_array("bias", bias)
    if bias is not None and bias.shape != axes.columns:
        raise ValueError(
            f"bias has shape {list(bias.shape)}; kernel {list(kernel.shape)} with contracting_dims "
            f"{contracting_dims!r} needs {list(axes.columns)}"
        )
    if bias is not None:
        dtype_name(bias.dtype, "bias")
    check_state(options.recipe, state, 1)
    rows, matrix = in_blocks(placement, x, axes), as_stack(placement, kernel, axes)
    check_shards(placement, options.recipe, rows, matrix, axes.weight)
    partial_axes = partial_sum_axes(placement)
    if partial_axes:
        options = options._replace(preferred_element_type=jnp.float32)
    layer = layer_for(options, rows, matrix, weight=axes.weight, training=False, placement=placement)
    if placement is not None and state is not None:
        state = placed_state(placement, "state", state)
    row = on_first_shard(as_row(placement, bias), partial_axes)
    sizes = sizes_of_one_group(placement, rows)
    return DenseOperands(axes, layer, placement, rows, matrix, row, state, sizes, partial_axes)
