"""The forward and backward of a grouped MLP.

Forward:   x quantized -> fc1 -> h -> activation x probs + quantize -> fc2 -> y
Backward:  dy quantized -> fc2's dgrad and wgrad -> activation's gradient + bias gradient + quantize -> fc1's

Kept for backward, in bytes an element of a bf16 call whose recipe has codes of one byte (scales aside): 1 of x, 2 of h,
1 of the activation, 1 of each weight. What a high-precision wgrad slot reads of the activation is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo_torch.arithmetic import operations
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.interleaving import from_halves, to_halves
from octavo_torch.compiler.second_derivative import once_differentiated
from octavo_torch.functions.activations import activate_gradient, probs_gradient
from octavo_torch.linear.autograd import (
    Saved,
    check_grad_input,
    quantize_operand,
    wanted_gradients,
    weight_gradient,
)
from octavo_torch.linear.contexts import run_backward
from octavo_torch.mlp.forward import MlpCall, activation_again, forward, run_fused
from octavo_torch.mlp.plan import MlpPlan
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.seeds import SeedCounter
from octavo_torch.wgrad.function import interleaved_wgrad


class GroupedMLPFunction(torch.autograd.Function):
    """grouped_mlp with gradients of x, weights, probs, biases and bias2_scales, each only where it is asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        call: MlpCall,
        out: Tensor | None,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        probs: Tensor | None,
        bias1: Tensor | None,
        bias2: Tensor | None,
        bias2_scales: Tensor | None,
        anchor: Tensor | None,
    ) -> Tensor:
        """y [M, N], which is `out` where that is given; `anchor` is a DelayedWgrad's."""
        plan = call.plan
        fc1, fc2 = plan.fc1, plan.fc2
        made = forward(call, x, w1, w2, probs, bias1, bias2, bias2_scales)
        # prepared sizes are the call's own: the caller's may change before backward, these do not
        tensors: list[Tensor | None] = [None if plan.prepare is not None else call.sizes, None, None, None, None]
        if fc2.need_dx or (fc2.need_dw and not fc2.quantized_wgrad):
            tensors[1:3] = [made.h, probs]
        if bias2_scales is not None:
            tensors[3:] = [bias2, bias2_scales]
        if fc1.need_dw:
            ctx.x = Saved(made.x if fc1.quantized_wgrad else x, tensors)
        if fc1.need_dx:
            ctx.w1 = Saved(made.w1 if fc1.quantized_dgrad else w1, tensors)
        if fc2.need_dw and fc2.quantized_wgrad:
            ctx.a = Saved(made.a, tensors)
        if fc2.need_dx:
            ctx.w2 = Saved(made.w2 if fc2.quantized_dgrad else w2, tensors)
        ctx.save_for_backward(*tensors)
        ctx.call = call
        arrays = (x, w1, w2, probs, bias1, bias2, bias2_scales, anchor)
        ctx.dtypes = [None if value is None else value.dtype for value in arrays]
        if out is not None:
            ctx.mark_dirty(out)
        return made.y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        with torch.no_grad():
            grads = run_backward(_backward, ctx, dy)
        return (None, None, *once_differentiated(grads, dy))


def _backward(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    call: MlpCall = ctx.call
    plan = call.plan
    fc1, fc2 = plan.fc1, plan.fc2
    tensors = ctx.saved_tensors
    sizes, h, probs, bias2, bias2_scales = tensors[:5]
    if plan.prepare is not None:
        sizes = call.sizes
    needs = wanted_gradients(ctx, ctx.needs_input_grad[2:], dy)
    need_x, need_w1, need_w2, need_p, need_b1, need_b2, need_s2, need_later = needs
    need_w1, need_w2 = (
        need or (need_later and target is not None and target.store is not None)
        for need, target in zip((need_w1, need_w2), call.targets, strict=True)
    )
    dx = dw1 = dw2 = dp = db1 = db2 = ds2 = None
    seed1 = seed2 = None
    before_activation = need_x or need_w1 or need_p or need_b1
    rounds = need_w2 or before_activation
    if rounds and (fc1.needs_seed or fc2.needs_seed):
        seed1, seed2 = call.drawn(SeedCounter.take)
    state1, state2 = call.states
    given = None if call.grad_input is None else dy
    if dy.dtype is not fc2.row_dtype:
        dy = dy.to(fc2.row_dtype)
    if need_b2 or need_s2:
        sums = operations.bias_grads(dy, _bounded(plan, sizes, dy), bias2, bias2_scales)
        db2 = sums[0] if need_b2 else None
        ds2 = sums[1] if need_s2 else None
    codes = None
    if rounds and fc2.quantize_dy is not None:
        codes = quantize_operand(fc2, fc2.quantize_dy, dy, "dy", sizes, seed2, state2, call.record, call.group_offset)
    if need_w2:
        assert fc2.wgrad is not None
        rows = codes if fc2.quantized_wgrad else dy
        a = ctx.a.load(tensors) if fc2.quantized_wgrad else activation_again(call, h, probs, sizes, seed2)
        dw2 = weight_gradient(fc2.wgrad, a, rows, sizes, call.targets[1], call)
        del a, rows
    if before_activation:
        assert fc2.dgrad is not None
        da = fc2.dgrad(codes if fc2.quantized_dgrad else dy, ctx.w2.load(tensors), sizes)
        if da.dtype is not h.dtype:
            da = da.to(h.dtype)
        del codes, dy
        if not (need_x or need_w1 or need_b1):
            dp = probs_gradient(da, h, plan.activation)
        else:
            dh, codes, db1, dp = _gradient_of_h(call, da, h, probs, sizes, seed1, state1, need_b1, need_p)
            if need_x:
                assert fc1.dgrad is not None
                w1 = ctx.w1.load(tensors)
                if call.block and not fc1.quantized_dgrad:
                    w1 = to_halves(w1, call.block)
                if call.grad_input is not None and given is not None:
                    check_grad_input(call.grad_input, given)
                dx = fc1.dgrad(codes if fc1.quantized_dgrad else dh, w1, sizes, out=call.grad_input)
            if need_w1:
                assert fc1.wgrad is not None
                wgrad = interleaved_wgrad(fc1.wgrad, call.block) if call.block else fc1.wgrad
                rows = codes if fc1.quantized_wgrad else dh
                dw1 = weight_gradient(wgrad, ctx.x.load(tensors), rows, sizes, call.targets[0], call)
            if db1 is not None and call.block:
                db1 = from_halves(db1, call.block)
    return [
        grad if grad is None or dtype is None or grad.dtype is dtype else grad.to(dtype)
        for grad, dtype in zip((dx, dw1, dw2, dp, db1, db2, ds2, None), ctx.dtypes, strict=True)
    ]


def _bounded(plan: MlpPlan, sizes: Any, like: Tensor) -> Tensor:
    bounded: Tensor = (
        sizes.group_sizes if plan.prepare is not None else operations.bound_sizes(sizes, like.shape[0], like)
    )
    return bounded


def _gradient_of_h(
    call: MlpCall,
    da: Tensor,
    h: Tensor,
    probs: Tensor | None,
    sizes: Any,
    seed: Any,
    state: DelayedState | None,
    need_bias: bool,
    need_probs: bool,
) -> tuple[Tensor | None, GroupedTensor | None, Tensor | None, Tensor | None]:
    """The gradient of fc1's result as fc1's GEMMs read it, plain or quantized; those of its bias and of probs."""
    plan = call.plan
    if plan.run_dact is not None:
        names = (("dbias", need_bias), ("dprobs", need_probs))
        wanted = tuple([name for name, needed in names if needed])
        codes, extras = run_fused(
            call, plan.dact, plan.run_dact, "dy", (da, h), probs, sizes, seed, state, call.record, wanted
        )
        dp = extras.dprobs
        if need_probs and dp is None:
            dp = probs_gradient(da, h, plan.activation)
        return extras.activated, codes, extras.dbias, dp
    dh = activate_gradient(da, h, probs, plan.activation)
    made = None
    if plan.fc1.quantize_dy is not None:
        made = quantize_operand(
            plan.fc1, plan.fc1.quantize_dy, dh, "dy", sizes, seed, state, call.record, call.group_offset
        )
    db = operations.bias_grads(dh, _bounded(plan, sizes, dh), None, None)[0] if need_bias else None
    return dh, made, db, probs_gradient(da, h, plan.activation) if need_probs else None


grouped_mlp_function: Callable[..., Tensor] = GroupedMLPFunction.apply
