"""From the arguments of a grouped MLP to what `octavo_mlp` takes: checks them, finds the plan, arranges the arrays."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from octavo import Recipe
from octavo_jax.arrays.sizes import GroupSizes, as_group_sizes
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.layer import LayerOptions
from octavo_jax.dispatch.room import Room
from octavo_jax.linear.arguments import check_sizes_fit, context_of
from octavo_jax.linear.operands import Context
from octavo_jax.mlp.arguments import check_mlp_operands, check_states, mlp_placements, placed_mlp
from octavo_jax.mlp.autograd import MlpArrays, States
from octavo_jax.mlp.plan import Mlp, OutputNames, mlp_for
from octavo_jax.sharding.axes import MeshAxes, called_function
from octavo_jax.sharding.conflicts import check_has_roles, check_shards
from octavo_jax.sharding.manual_sums import on_first_shard, partial_sum_axes
from octavo_jax.sharding.placement_of_call import placement_of
from octavo_registry.contract.cards import Activation


class MlpOptions(NamedTuple):
    """The arguments of `octavo_jax.grouped_mlp` that have no gradient, except the sizes.

    activation and recipe have been looked up, and sharding is that of the call or of `octavo_jax.mesh_roles`.
    """

    activation: Activation
    recipe: Recipe | None
    seed: int | Array | None
    state: States | None
    group_offset: int | Array
    checkpoint_name: str | None
    output_checkpoint_names: OutputNames
    preferred_element_type: DTypeLike | None
    sharding: MeshAxes | None
    backend: BackendNames
    room: Room | None


class MlpCall(NamedTuple):
    """The arguments of `octavo_mlp`, and what has to be done with its result.

    in_blocks          whether rows are [*B, M, K], as the caller has given them, and not reshaped to [M, K]
    partial_sum_axes   the caller's manual mesh axes over which y is still to be summed; y is then float32
    """

    mlp: Mlp
    arrays: MlpArrays
    states: States | None
    context: Context
    in_blocks: bool
    partial_sum_axes: tuple[str, ...]


def resolve_call(a: MlpArrays, group_sizes: GroupSizes, options: MlpOptions, rows: int | None = None) -> MlpCall:
    """The call for the arrays `a`, without a normalization; ValueError for arguments that do not fit.

    rows   the number of rows that the sizes count, if `a.x` are tokens, whose rows do not exist yet
    """
    recipe, sharding = options.recipe, options.sharding
    x, wi, wo = a.x, a.wi, a.wo
    placements = mlp_placements(placement_of(sharding, group_sizes, x, wi), options.activation)
    optional = {"bi": a.bi, "bo": a.bo, "probs": a.probs, "bo_scales": a.bo_scales, "state": options.state}
    check_has_roles("grouped_mlp", sharding, x=x, wi=wi, wo=wo, group_sizes=group_sizes, **optional)
    groups = check_mlp_operands(x, wi, wo, a.bi, a.bo, options.activation, placements)
    blocks = () if placements[0] is None else placements[0].blocks
    in_blocks = x.ndim == len(blocks) + 2
    if not in_blocks:
        probs, bo_scales = (None if array is None else array.reshape(-1) for array in (a.probs, a.bo_scales))
        a = a._replace(x=x.reshape(-1, x.shape[-1]), probs=probs, bo_scales=bo_scales)
    sizes = as_group_sizes(group_sizes, a.x.shape[-2] if rows is None else rows, blocks)
    check_sizes_fit(sizes, groups, placements[0], "wi")
    check_states(recipe, options.state, groups)
    for placement, kernel in zip(placements, (wi, wo), strict=True):
        check_shards(placement, recipe, x, kernel, "kn")
    partial_axes = partial_sum_axes(placements[1])
    dtype = jnp.float32 if partial_axes else options.preferred_element_type
    called = called_function("grouped_mlp", sharding)
    layer_options = LayerOptions.of(recipe, dtype, options.checkpoint_name, None, options.backend, called, options.room)
    mlp = mlp_for(layer_options, options.output_checkpoint_names, a.x, wi, wo, options.activation, None, placements)
    a, state, sizes = placed_mlp(placements, a._replace(bo=on_first_shard(a.bo, partial_axes)), options.state, sizes)
    context = context_of(recipe, sizes, options.seed, options.group_offset)
    return MlpCall(mlp, a, state, context, in_blocks, partial_axes)
