"""grouped_dense: the differentiable grouped linear layer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.arrays.axes import ContractingDims, grouped_weight
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.arrays.sizes import GroupSizes, as_group_sizes, in_one_array, status
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.layer import LayerOptions, layer_for
from octavo_jax.dispatch.room import Room
from octavo_jax.linear.arguments import as_array, check_operands, check_sizes_fit, check_state, context_of
from octavo_jax.linear.autograd import run_layer
from octavo_jax.linear.expert_rows import ExpertRows
from octavo_jax.scaling.delayed_state import DelayedState
from octavo_jax.sharding.axes import MeshAxes, called_function, roles_in_force
from octavo_jax.sharding.conflicts import check_has_roles, check_shards
from octavo_jax.sharding.explicit_placement import LayerArrays, placed_as, placed_layer
from octavo_jax.sharding.manual_sums import on_first_shard, partial_sum_axes, summed_result
from octavo_jax.sharding.placement_of_call import placement_of


def grouped_dense(
    x: Array | np.ndarray,
    kernel: Array | np.ndarray,
    group_sizes: GroupSizes,
    *,
    recipe: RecipeLike,
    contracting_dims: ContractingDims = ((-1,), (1,)),
    bias: Array | np.ndarray | None = None,
    seed: int | Array | None = None,
    state: DelayedState | None = None,
    group_offset: int | Array = 0,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    output_checkpoint_name: str | None = None,
    preferred_element_type: DTypeLike | None = None,
    sharding: MeshAxes | None = None,
    return_status: bool = False,
    backend: BackendNames = None,
    room: Room | None = None,
) -> Any:
    """y[r] = x[r] @ kernel[g] + bias[g] for every row r of group g.

    x                        [M, K] bf16, fp16 or fp32; rows are sorted by group. [*B, M, K]
                             counts as [prod(B) * M, K], and y has the axes back; unless the sizes have them, too
    kernel                   [G, K, N], or [G, N, K] with contracting_dims=((-1,), (2,)); not transposed in memory
    group_sizes              [G] integers, sum <= M: checked on the host and in a jax.Array on a CPU; clamped and never
                             read back where they are traced or on an accelerator.
                             [*B, G]: of blocks of rows, each with a tail of its own; the kernel is [E * G, K, N] then
    recipe                   a Recipe, or the name of one (`octavo.recipe`); None: HighPrecision
    contracting_dims         of x and the kernel, as `jax.lax.dot_general` has them; negative ones count from the end
    bias                     [G, N]
    seed                     of stochastic rounding: an int, an integer scalar array, uint32 [2] words, or a key of
                             jax.random.key
    state                    delayed scaling's `DelayedState`, whose documentation says how the backward updates it
    group_offset             number of the first group, in stochastic rounding's counter
    checkpoint_name          what `jax.checkpoint` policies call the quantized x and kernel; None: no name
    output_checkpoint_name   what they call y; None: no name
    preferred_element_type   dtype of y; None: recipe.output_dtype, else x's
    sharding                 which mesh axes play which part, an `octavo_jax.MeshAxes`; None: one device, or arrays
                             that the caller's shard_map has cut, unless `octavo_jax.mesh_roles` says more
    return_status            also return an int32 status word: 0, or 1 (a size was negative) + 2 (sum past M). Sizes in
                             a jax.Array on a CPU are then clamped, too, and not checked
    backend                  a name or a closed list of names
    room                     multiprocessors that the GEMMs leave to what runs beside them; None: they take all

    Returns y [*B, M, N], rows past the sum zero and x not read there; then, where asked for, the new state and the
    status word: y, (y, state), (y, status) or (y, state, status).

    Blocks of rows are of experts, B = (E,), of data, (F,), or of both, (E, F); without E the kernel has G matrices.
    Expert block e has groups e * G to (e + 1) * G - 1 of the kernel, bias and state. Each group of a block has scales
    of its own; gradients, and the amaxes of delayed scaling, are taken over data blocks. In stochastic rounding's
    counter the first group of block (e, f) has number group_offset + (f * E + e) * G.

    With `sharding`, B is sharded by ep and by dp and fsdp, the kernel by ep, fsdp and tp. x [M, K] with sizes [G] is
    sharded by ep, too: a device has M / E rows for its G / E experts, with a tail of their own. Tokens stay on their
    devices. Shards of the kernel are quantized, and the plane that a GEMM reads is gathered; the kernel's gradient is
    summed and scattered over fsdp, and summed over dp. Inside shard_map, the roles of its manual axes say which local
    arrays are shards of one array.

    Reverse-mode differentiable once in x, kernel and bias; JAX refuses jvp of it. Gradients have the dtypes of their
    arguments. A GEMM whose slot is high precision multiplies operands of one dtype, x's and the kernel's, or fp32 where
    these differ: dy is rounded to it where `preferred_element_type` is wider. A function that is not differentiated
    needs no backend for the gradients.

    Raises ValueError for arguments that do not fit, NoBackendError when no installed backend serves them (`octavo why`
    prints the same table).
    """
    recipe, sharding = as_recipe(recipe), roles_in_force(sharding)
    x, kernel = as_array("x", x), as_array("kernel", kernel)
    bias = None if bias is None else as_array("bias", bias)
    weight = grouped_weight(contracting_dims, x.ndim)
    group_sizes = in_one_array(group_sizes)
    expert_rows = ExpertRows.of(sharding, x, group_sizes)
    x, group_sizes = expert_rows.in_blocks("x", x, "i"), expert_rows.sizes(group_sizes)
    placement = placement_of(sharding, group_sizes, x, kernel)
    groups, k, n = check_operands(x, kernel, weight, bias, placement)
    blocks = () if placement is None else placement.blocks
    rows = x if x.ndim == len(blocks) + 2 else x.reshape(-1, k)
    sizes = as_group_sizes(group_sizes, rows.shape[-2], blocks, reports=return_status)
    check_sizes_fit(sizes, groups, placement)
    check_state(recipe, state, groups)
    check_shards(placement, recipe, x, kernel, weight)
    check_has_roles("grouped_dense", sharding, x=x, kernel=kernel, group_sizes=group_sizes, bias=bias, state=state)
    partial_axes = partial_sum_axes(placement)
    options = LayerOptions.of(
        recipe,
        jnp.float32 if partial_axes else preferred_element_type,
        checkpoint_name=checkpoint_name,
        output_checkpoint_name=output_checkpoint_name,
        backend=backend,
        called=called_function("grouped_dense", sharding),
        room=room,
    )
    layer = layer_for(options, rows, kernel, weight=weight, training=False, placement=placement)
    a = LayerArrays(rows, kernel, on_first_shard(bias, partial_axes), sizes, state)
    if placement is not None:
        a = placed_layer(placement, weight, a)
    context = context_of(recipe, a.group_sizes, seed, group_offset)
    y, new_state = run_layer("grouped_dense", layer, a.x, a.kernel, a.bias, a.state, context)
    y = summed_result(y, partial_axes, recipe, x, preferred_element_type)
    y = y.reshape(*x.shape[:-1], n) if y.ndim != x.ndim else y
    results: list[Any] = [expert_rows.out_of_blocks(y)]
    if state is not None:
        results.append(placed_as(state, new_state))
    if return_status:
        results.append(status(a.group_sizes, a.x.shape[-2]))
    return results[0] if len(results) == 1 else tuple(results)
