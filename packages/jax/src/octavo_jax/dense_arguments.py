"""What the layers of one kernel, `dense` and `layernorm_dense`, make of their arguments."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax import Array
from jax.typing import DTypeLike

from octavo import Recipe
from octavo_jax.axes import ContractingDims, DenseAxes, dense_axes
from octavo_jax.delayed import DelayedState
from octavo_jax.dispatch import Layer, Names, layer_for
from octavo_jax.layer_arguments import as_array, check_state


class DenseOperands(NamedTuple):
    """The layer, and its operands as one group: x [M, K], kernel [1, K, N] or [1, N, K], bias [1, N]."""

    axes: DenseAxes
    layer: Layer
    x: Array
    kernel: Array
    bias: Array | None


def dense_operands(
    x: Array,
    kernel: Array | np.ndarray,
    bias: Array | np.ndarray | None,
    state: DelayedState | None,
    contracting_dims: ContractingDims,
    *,
    recipe: Recipe | None,
    checkpoint_name: str | None,
    output_checkpoint_name: str | None,
    preferred_element_type: DTypeLike | None,
    backend: Names,
) -> DenseOperands:
    """The arguments of `octavo_jax.dense`, checked: ValueError where they do not go together."""
    kernel = as_array(kernel)
    axes = dense_axes(contracting_dims, x.shape, kernel.shape)
    if 0 in kernel.shape:
        raise ValueError(f"kernel has shape {list(kernel.shape)}; every axis is one or more")
    bias = None if bias is None else as_array(bias)
    if bias is not None and bias.shape != axes.columns:
        raise ValueError(
            f"bias has shape {list(bias.shape)}; kernel {list(kernel.shape)} with contracting_dims "
            f"{contracting_dims!r} needs {list(axes.columns)}"
        )
    check_state(recipe, state, 1)
    rows, matrix = x.reshape(-1, axes.k), kernel.reshape(axes.matrix)
    layer = layer_for(
        recipe,
        rows,
        matrix,
        preferred_element_type=preferred_element_type,
        checkpoint_name=checkpoint_name,
        output_checkpoint_name=output_checkpoint_name,
        backend=backend,
        weight=axes.weight,
        training=False,
    )
    return DenseOperands(axes, layer, rows, matrix, None if bias is None else bias.reshape(1, -1))
