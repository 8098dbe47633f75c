"""grouped_mlp and layernorm_mlp: fc1, activation, fc2 as one differentiable function, with fused quantizers.

What the backward pass keeps, in bytes per element, for a recipe of one-byte codes (bf16 arrays; scales aside):

    x (K)          1: the column plane of what fc1 multiplied; with a normalization also x itself, 2, and rstd, mean
    kernels        1 each: one plane
    y1 (C)         2: fc1's result, from which the activation is computed again
    activated (F)  1: the column plane of what fc2 multiplied

An operand whose wgrad slot is high precision is kept in its own dtype (x of fc1 without a normalization), or computed
again from what is above (normalized, activated).

Stochastic rounding: fc1 rounds with `seed`, fc2 with seed XOR 2^63, so no two operands of a call share random bits.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.arrays.axes import DenseAxes
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.arrays.sizes import GroupSizes, in_one_array
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.layer import LayerOptions
from octavo_jax.dispatch.room import Room
from octavo_jax.functions.activations import check_activation, check_per_row
from octavo_jax.functions.norms import check_norm
from octavo_jax.linear.arguments import as_array, context_of
from octavo_jax.linear.expert_rows import ExpertRows
from octavo_jax.mlp.arguments import (
    check_bo_scales,
    check_mlp_operands,
    check_states,
    mlp_placements,
    placed_mlp,
    y_columns,
)
from octavo_jax.mlp.autograd import MlpArrays, States, octavo_mlp
from octavo_jax.mlp.call import MlpOptions, resolve_call
from octavo_jax.mlp.plan import OutputNames, mlp_for
from octavo_jax.quantizers.derivatives import call_reverse_mode_only
from octavo_jax.sharding.axes import MeshAxes, called_function, roles_in_force
from octavo_jax.sharding.conflicts import check_shards
from octavo_jax.sharding.explicit_placement import placed_as
from octavo_jax.sharding.manual_sums import on_first_shard, partial_sum_axes, summed_result
from octavo_jax.sharding.one_matrix import (
    as_row,
    as_stack,
    in_blocks,
    matrix_placement,
    out_of_blocks,
    replicated_norm_parameters,
    sizes_of_one_group,
)
from octavo_registry.contract.cards import Activation, Norm

__all__ = ["OutputNames", "States", "grouped_mlp", "layernorm_mlp"]


def grouped_mlp(
    x: Array | np.ndarray,
    wi: Array | np.ndarray,
    wo: Array | np.ndarray,
    group_sizes: GroupSizes,
    *,
    activation: Activation = "swiglu",
    probs: Array | None = None,
    bi: Array | None = None,
    bo: Array | None = None,
    bo_scales: Array | None = None,
    recipe: RecipeLike,
    seed: int | Array | None = None,
    state: States | None = None,
    group_offset: int | Array = 0,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    output_checkpoint_names: OutputNames = (None, None),
    preferred_element_type: DTypeLike | None = None,
    sharding: MeshAxes | None = None,
    backend: BackendNames = None,
    room: Room | None = None,
) -> Any:
    """y[r] = (act(x[r] @ wi[g] + bi[g]) * probs[r]) @ wo[g] + bo_scales[r] * bo[g] for every row r of group g.

    x                         [M, K], or [*B, M, K], which counts as [prod(B) * M, K]; bf16, fp16 or fp32
    wi, wo                    [G, K, C] and [G, F, N]; C = 2 F, the gate first, where the activation is gated, else F
    group_sizes               [G] integers, sum <= M, checked or clamped as in `grouped_dense`
    activation                silu, gelu, gelu_tanh, relu2, swiglu, geglu, geglu_tanh or clamped_swiglu, see `activate`
    probs                     [M] float32, such as a router's weights; None: 1
    bi, bo                    [G, C] and [G, N]
    bo_scales                 [M] float32, often `probs` once more; None: 1
    recipe                    of both layers: a Recipe, or the name of one; None: HighPrecision
    seed                      of stochastic rounding, as in `grouped_dense`; fc2 takes seed XOR 2^63
    state                     delayed scaling's: a pair of `DelayedState`, fc1's and fc2's
    group_offset              number of the first group, in stochastic rounding's counter
    checkpoint_name           what policies call the quantized x, activated operand and kernels; None: no name
    output_checkpoint_names   what they call fc1's and fc2's results; None: no name
    preferred_element_type    dtype of y; None: recipe.output_dtype, else x's
    sharding                  which mesh axes play which part, as in `grouped_dense`; tp cuts wi's C and wo's F, fsdp
                              wi's K and wo's N unless its fsdp_dim says which
    backend                   a name or a closed list of names
    room                      multiprocessors that the GEMMs leave to what runs beside them; None: they take all

    Blocks of rows, [*B, M, K] with sizes [*B, G], and shards are `grouped_dense`'s; probs and bo_scales are [*B, M]
    then. Where tp is manual, a gated activation's wi is locally the gate of the shard's own features, then their
    partner.

    Returns y [M, N], rows past the sum zero and x, probs and bo_scales not read there; with a state (y, new state).
    fc1's result and what is quantized of it are rounded once to the recipe's output_dtype, else x's.

    Reverse-mode differentiable once in x, wi, wo, bi, bo, probs and bo_scales. The activation and the second quantizer
    are one function where a backend has it, and so are the activation's gradient, bi's and the quantizer in the
    backward pass; else they are composed. Raises ValueError for arguments that do not fit, NoBackendError when nothing
    serves them.
    """
    recipe, x, wi, wo = as_recipe(recipe), as_array("x", x), as_array("wi", wi), as_array("wo", wo)
    name, sharding = check_activation(activation), roles_in_force(sharding)
    if wi.ndim != 3:
        raise ValueError(f"wi has shape {list(wi.shape)}; it is [G, K, C], layernorm_mlp takes one matrix")
    check_per_row("probs", probs, x.shape[:-1])
    check_bo_scales(bo_scales, bo, x.shape[:-1])
    group_sizes = in_one_array(group_sizes)
    expert_rows = ExpertRows.of(sharding, x, group_sizes)
    x, group_sizes = expert_rows.in_blocks("x", x, "i"), expert_rows.sizes(group_sizes)
    probs = None if probs is None else expert_rows.in_blocks("probs", probs, None)
    bo_scales = None if bo_scales is None else expert_rows.in_blocks("bo_scales", bo_scales, None)
    options = MlpOptions(
        activation=name,
        recipe=recipe,
        seed=seed,
        state=state,
        group_offset=group_offset,
        checkpoint_name=checkpoint_name,
        output_checkpoint_names=output_checkpoint_names,
        preferred_element_type=preferred_element_type,
        sharding=sharding,
        backend=backend,
        room=room,
    )
    arrays = MlpArrays(x=x, gamma=None, beta=None, wi=wi, wo=wo, bi=bi, bo=bo, probs=probs, bo_scales=bo_scales)
    call = resolve_call(arrays, group_sizes, options)
    y, new_state = call_reverse_mode_only("grouped_mlp", octavo_mlp, call.mlp, call.arrays, call.states, call.context)
    y = summed_result(y, call.partial_sum_axes, recipe, x, preferred_element_type)
    y = expert_rows.out_of_blocks(y if call.in_blocks else y.reshape(*x.shape[:-1], y.shape[-1]))
    return y if state is None else (y, placed_as(state, new_state))


def layernorm_mlp(
    x: Array | np.ndarray,
    gamma: Array,
    wi: Array | np.ndarray,
    wo: Array | np.ndarray,
    beta: Array | None = None,
    *,
    norm: Norm = "rms",
    epsilon: float = 1e-6,
    activation: Activation = "swiglu",
    bi: Array | None = None,
    bo: Array | None = None,
    recipe: RecipeLike,
    seed: int | Array | None = None,
    state: States | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    output_checkpoint_names: OutputNames = (None, None),
    preferred_element_type: DTypeLike | None = None,
    sharding: MeshAxes | None = None,
    backend: BackendNames = None,
    room: Room | None = None,
) -> Any:
    """y = act(normalize(x) @ wi + bi) @ wo + bo, the normalization fused with the first quantizer.

    x            [..., M, K] bf16, fp16 or fp32
    gamma, beta  [K] in x's dtype; RMSNorm takes no beta
    wi, wo       [K, C] and [F, N]; bi [C], bo [N]
    norm         "rms" or "layer"; epsilon is added to the mean square
    sharding     which mesh axes play which part: dp and fsdp cut the first axis of x, as in `octavo_jax.dense`; the
                 kernels are cut as in `grouped_mlp`

    The other arguments, what is returned and what is raised are `grouped_mlp`'s for one group of all rows; delayed
    scaling's states are for one group. Differentiable in x, gamma, beta, wi, wo, bi and bo.
    """
    recipe, x, wi, wo = as_recipe(recipe), as_array("x", x), as_array("wi", wi), as_array("wo", wo)
    name = check_activation(activation)
    if wi.ndim != 2:
        raise ValueError(f"wi has shape {list(wi.shape)}; it is [K, C], grouped_mlp takes one matrix per group")
    placement = matrix_placement("layernorm_mlp", sharding, x, wi, wi=wi, wo=wo, bi=bi, bo=bo, state=state)
    placements = mlp_placements(placement, name)
    check_mlp_operands(x, wi, wo, bi, bo, name, placements)
    spec = check_norm(norm, epsilon, x, gamma, beta)
    check_states(recipe, state, 1)
    into = DenseAxes("kn", x.shape[:-1], wi.shape[1:], x.shape[-1], 1)
    out = into._replace(columns=(y_columns(wo, placements[1]),), k=wo.shape[0])
    rows = in_blocks(placements[0], x, into)
    kernels = as_stack(placements[0], wi, into), as_stack(placements[1], wo, out)
    for placement, kernel in zip(placements, kernels, strict=True):
        check_shards(placement, recipe, rows, kernel, "kn")
    partial_axes = partial_sum_axes(placements[1])
    dtype = jnp.float32 if partial_axes else preferred_element_type
    called = called_function("layernorm_mlp", sharding)
    options = LayerOptions.of(recipe, dtype, checkpoint_name, None, backend, called, room)
    mlp = mlp_for(options, output_checkpoint_names, rows, *kernels, name, spec, placements)
    biases = as_row(placements[0], bi), on_first_shard(as_row(placements[1], bo), partial_axes)
    gamma, beta = replicated_norm_parameters("layernorm_mlp", placements[0], gamma, beta)
    (wi, wo), (bi, bo) = kernels, biases
    arrays = MlpArrays(x=rows, gamma=gamma, beta=beta, wi=wi, wo=wo, bi=bi, bo=bo, probs=None)
    arrays, state, sizes = placed_mlp(placements, arrays, state, sizes_of_one_group(placements[0], rows))
    context = context_of(recipe, sizes, seed, 0)
    y, new_state = call_reverse_mode_only("layernorm_mlp", octavo_mlp, mlp, arrays, state, context)
    y = summed_result(y, partial_axes, recipe, x, preferred_element_type)
    y = out_of_blocks(placements[1], y, out)
    return y if state is None else (y, new_state)
