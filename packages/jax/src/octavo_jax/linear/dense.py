"""dense: the differentiable linear layer of one matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import Array
from jax.typing import DTypeLike

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.arrays.axes import ContractingDims
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.layer import LayerOptions
from octavo_jax.dispatch.room import Room
from octavo_jax.linear.arguments import as_array, context_of
from octavo_jax.linear.autograd import run_layer
from octavo_jax.linear.dense_arguments import dense_operands
from octavo_jax.scaling.delayed_state import DelayedState
from octavo_jax.sharding.axes import MeshAxes, called_function
from octavo_jax.sharding.manual_sums import summed_result
from octavo_jax.sharding.one_matrix import out_of_blocks


def dense(
    x: Array | np.ndarray,
    kernel: Array | np.ndarray,
    *,
    recipe: RecipeLike,
    contracting_dims: ContractingDims = ((-1,), (0,)),
    bias: Array | np.ndarray | None = None,
    seed: int | Array | None = None,
    state: DelayedState | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    output_checkpoint_name: str | None = None,
    preferred_element_type: DTypeLike | None = None,
    sharding: MeshAxes | None = None,
    backend: BackendNames = None,
    room: Room | None = None,
) -> Any:
    """x times one kernel, plus bias: `octavo_jax.grouped_dense` of a single group, with the same bits and names.

    x                  [..., *K] bf16, fp16 or fp32
    kernel             [*K, *N], or [*N, *K] with its last axes contracted; neither is transposed in memory
    contracting_dims   axes of x and of the kernel, as `jax.lax.dot_general` has them: the last ones of x with the first
                       or the last ones of the kernel, in one order; negative ones count from the end
    bias               [*N]
    state              delayed scaling's `DelayedState` of one group
    sharding           which mesh axes play which part: dp and fsdp cut the first axis of x, fsdp and tp the kernel,
                       along the first axis that is contracted (K) or that stays (N). Each shard's tokens are a block
                       with scales of its own, as in `octavo_jax.grouped_dense`

    The other arguments are those of `octavo_jax.grouped_dense`. Returns y [..., *N], and (y, state) with a state.
    Differentiable as `grouped_dense`, and raises the same errors.
    """
    recipe, x = as_recipe(recipe), as_array("x", x)
    options = LayerOptions.of(
        recipe,
        preferred_element_type,
        checkpoint_name=checkpoint_name,
        output_checkpoint_name=output_checkpoint_name,
        backend=backend,
        called=called_function("dense", sharding),
        room=room,
    )
    operands = dense_operands("dense", options, x, kernel, bias, state, contracting_dims, sharding)
    context = context_of(recipe, operands.group_sizes, seed, 0)
    y, new_state = run_layer(
        "dense", operands.layer, operands.x, operands.kernel, operands.bias, operands.state, context
    )
    y = summed_result(y, operands.partial_sum_axes, recipe, x, preferred_element_type)
    y = out_of_blocks(operands.placement, y, operands.axes)
    return y if state is None else (y, new_state)
