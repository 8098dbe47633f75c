"""Checks of grouped_mlp's arguments: what was given, what is needed, what to do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from octavo_registry.contract.cards import GATED, Activation
from octavo_torch.arrays.dtypes import DTYPE_NAMES, ONE_DTYPE, name_of
from octavo_torch.arrays.operands import check_sides, check_tensor
from octavo_torch.dispatch.room import check_room
from octavo_torch.functions.activations import check_activation, features
from octavo_torch.linear.arguments import check_buffer, check_like, check_state
from octavo_torch.mlp.activation_module import check_probs
from octavo_torch.mlp.call import MlpCall, Operands
from octavo_torch.mlp.plan import MlpPlan
from octavo_torch.quantizers.arguments import NEEDS_SEED, check_group_offset
from octavo_torch.scaling.seeds import check_seed


def check_operands(x: Tensor, w1: Tensor, w2: Tensor, activation: object) -> Activation:
    """x [M, K], w1 [G, 2 F or F, K] and w2 [G, N, F] of one dtype on one device; the activation's name."""
    name = check_activation(activation)
    if not (
        isinstance(x, Tensor)
        and isinstance(w1, Tensor)
        and isinstance(w2, Tensor)
        and x.dim() == 2
        and w1.dim() == w2.dim() == 3
        and x.dtype is w1.dtype
        and x.dtype is w2.dtype
        and x.dtype in DTYPE_NAMES
        and x.layout is w1.layout is w2.layout is torch.strided
        and not isinstance(x, DTensor)
        and x.device == w1.device == w2.device
        and x.shape[1] == w1.shape[2]
        and w1.shape[0] == w2.shape[0]
        and w1.numel()
        and w2.numel()
        and w1.shape[1] == w2.shape[2] * (2 if name in GATED else 1)
    ):
        _explain(x, w1, w2, name)
    return name


def _explain(x: Tensor, w1: Tensor, w2: Tensor, activation: Activation) -> None:
    check_tensor("x", x, "[M, K]")
    first = "[G, 2 F, K]" if activation in GATED else "[G, F, K]"
    for name, weight, shape in (("w1", w1, first), ("w2", w2, "[G, N, F]")):
        check_tensor(name, weight, shape)
        if not weight.shape[0]:
            raise ValueError(f"{name} has shape {list(weight.shape)}; give at least one group")
        check_sides(name, weight)
        if weight.dtype is not x.dtype:
            raise ValueError(f"x has dtype {name_of(x.dtype)} and {name} {name_of(weight.dtype)}; {ONE_DTYPE}")
        if weight.device != x.device:
            raise ValueError(f"x is on {x.device} and {name} on {weight.device}; move one to the other's device")
    if x.shape[1] != w1.shape[2]:
        raise ValueError(
            f"x has {x.shape[1]} features and w1 has shape {list(w1.shape)}; give w1 with K = {x.shape[1]} at its end"
        )
    if w1.shape[0] != w2.shape[0]:
        raise ValueError(f"w1 has {w1.shape[0]} groups and w2 {w2.shape[0]}; give both the same number")
    width = features(int(w1.shape[1]), activation, "w1's result")
    raise ValueError(
        f"w1 has shape {list(w1.shape)} and w2 {list(w2.shape)}; {activation} makes {width} features of w1's "
        f"{w1.shape[1]}, so give w2 [{w1.shape[0]}, N, {width}]"
    )


def check_mlp(call: MlpCall, plan: MlpPlan, operands: Operands) -> None:
    """The arguments other than x and the weights fit these and the recipe."""
    x, _, _, probs, bias1, bias2, bias2_scales = operands
    rows = x.shape[0]
    if probs is not None:
        check_probs(probs, x)
    if bias2_scales is not None:
        if bias2 is None:
            raise ValueError("bias2_scales was given without bias2; give both or neither")
        check_like("bias2_scales", bias2_scales, (rows,), x)
    check_common(call, plan, x, bias1, bias2)
    read = operands._asdict()
    if call.out is not None:
        check_buffer("out", call.out, (rows, int(plan.fc2.weight_shape[1])), plan.fc2.row_dtype, read)
    if call.grad_input is not None:
        check_buffer("grad_input", call.grad_input, tuple(x.shape), x.dtype, {**read, "out": call.out})


def check_common(call: MlpCall, plan: MlpPlan, x: Tensor, bias1: Tensor | None, bias2: Tensor | None) -> None:
    """Biases, seed and states fit the weights and the recipe."""
    groups = plan.fc1.groups
    if bias1 is not None:
        check_like("bias1", bias1, (groups, int(plan.fc1.weight_shape[1])), x)
    if bias2 is not None:
        check_like("bias2", bias2, (groups, int(plan.fc2.weight_shape[1])), x)
    if call.seed is not None:
        check_seed(call.seed)
    elif plan.fc1.needs_seed or plan.fc2.needs_seed:
        raise ValueError(NEEDS_SEED)
    check_group_offset(call.group_offset, groups)
    check_room(call.room)
    _check_states(plan, call.states, x)


def _check_states(plan: MlpPlan, states: object, x: Tensor) -> None:
    groups = plan.fc1.groups
    if states is None or not plan.recipe.stateful:
        check_state(plan.recipe, states, x, groups)
        return
    if not isinstance(states, tuple | list) or len(states) != 2:
        raise ValueError(f"state is a {type(states).__name__}; give two DelayedStates, (fc1's, fc2's)")
    for state in states:
        check_state(plan.recipe, state, x, groups)
