"""layernorm_dense: a normalization and a linear layer as one differentiable function, its quantizer fused.

What the backward pass keeps, in bytes per element, for a recipe of one-byte codes (bf16 arrays; scales aside): x
itself 2, the normalized operand's column plane 1, one plane of the kernel 1, and rstd (and mean) 4 per row. Where the
wgrad slot is high precision, the normalized operand is computed again from x.
"""

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
from octavo_jax.functions.norms import check_norm
from octavo_jax.linear.arguments import as_array, context_of
from octavo_jax.linear.dense_arguments import dense_operands
from octavo_jax.linear.normalized_autograd import NormalizedDenseArrays, norm_layer_of, octavo_layernorm_dense
from octavo_jax.quantizers.derivatives import call_reverse_mode_only
from octavo_jax.scaling.delayed_state import DelayedState
from octavo_jax.sharding.axes import MeshAxes, called_function, roles_in_force
from octavo_jax.sharding.one_matrix import out_of_blocks, replicated_norm_parameters
from octavo_registry.contract.cards import Norm


def layernorm_dense(
    x: Array | np.ndarray,
    kernel: Array | np.ndarray,
    gamma: Array,
    beta: Array | None = None,
    *,
    norm: Norm = "rms",
    epsilon: float = 1e-6,
    recipe: RecipeLike,
    bias: Array | np.ndarray | None = None,
    seed: int | Array | None = None,
    state: DelayedState | None = None,
    contracting_dims: ContractingDims = ((-1,), (0,)),
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    output_checkpoint_name: str | None = None,
    preferred_element_type: DTypeLike | None = None,
    return_normalized: bool = False,
    sharding: MeshAxes | None = None,
    backend: BackendNames = None,
    room: Room | None = None,
) -> Any:
    """y = normalize(x) @ kernel + bias: `octavo_jax.dense` of `octavo_jax.normalize`, its quantizer fused.

    x                  [..., K] bf16, fp16 or fp32
    kernel             [K, *N], or [*N, K] with its last axis contracted
    gamma, beta        [K] in x's dtype; RMSNorm takes no beta
    norm               "rms" or "layer"; epsilon is added to the mean square
    bias               [*N]
    return_normalized  also return the normalized rows [..., K] in x's dtype, for a residual connection that reads them
    sharding           as in `octavo_jax.dense`; tp cuts N alone

    The other arguments are those of `octavo_jax.dense`. Returns y [..., *N], then, where asked for, the normalized rows
    and the new state. Reverse-mode differentiable once in x, kernel, gamma, beta and bias. Raises the same errors.
    """
    recipe, x = as_recipe(recipe), as_array("x", x)
    spec = check_norm(norm, epsilon, x, gamma, beta)
    roles = roles_in_force(sharding)
    if roles is not None and roles.tp is not None and roles.tp_dim == "K":
        raise ValueError(
            f"tp={roles.tp!r} has tp_dim='K' and the normalization is over K, which that would cut; give tp_dim='N'"
        )
    options = LayerOptions.of(
        recipe,
        preferred_element_type,
        checkpoint_name=checkpoint_name,
        output_checkpoint_name=output_checkpoint_name,
        backend=backend,
        called=called_function("layernorm_dense", sharding),
        room=room,
    )
    operands = dense_operands("layernorm_dense", options, x, kernel, bias, state, contracting_dims, sharding)
    axes, placement = operands.axes, operands.placement
    if axes.k != x.shape[-1]:
        raise ValueError(
            f"contracting_dims is {contracting_dims!r}; the normalization is over the last axis of x alone, so "
            "contract that one"
        )
    context = context_of(recipe, operands.group_sizes, seed, 0)
    gamma, beta = replicated_norm_parameters("layernorm_dense", placement, gamma, beta)
    arrays = NormalizedDenseArrays(operands.x, gamma, beta, operands.kernel, operands.bias)
    normalized = norm_layer_of(operands.layer, spec)
    outputs = call_reverse_mode_only(
        "layernorm_dense", octavo_layernorm_dense, normalized, arrays, operands.state, context, return_normalized
    )
    results = [out_of_blocks(placement, outputs.y, axes)]
    if outputs.normalized is not None:
        results.append(out_of_blocks(placement, outputs.normalized, axes, "i"))
    if outputs.state is not None:
        results.append(outputs.state)
    return results[0] if len(results) == 1 else tuple(results)
