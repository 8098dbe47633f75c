"""The forward and backward of a grouped MLP.

Forward:   x quantized -> fc1 -> h -> activation x probs + quantize -> fc2 -> y
Backward:  dy quantized -> fc2's dgrad and wgrad -> activation's gradient + bias gradient + quantize -> fc1's

Saved for backward, in bytes per element of a bf16 call whose recipe has codes of one byte (scales aside): 1 of x, 2 of
h, 1 of the activation, 1 of each weight. What a high-precision wgrad slot reads of the activation is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo_torch.arithmetic import operators
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.interleaving import from_halves, to_halves
from octavo_torch.compiler.second_derivative import check_no_graph
from octavo_torch.dispatch.layer import Matrix
from octavo_torch.functions.activations import activate_gradient, probs_gradient
from octavo_torch.linear.autograd import (
    Context,
    Saved,
    bounded_sizes,
    caller_sizes,
    cast_gradients,
    check_grad_input,
    dtypes_of,
    needed_gradients,
    quantize_operand,
    weight_gradient,
)
from octavo_torch.linear.contexts import run_backward
from octavo_torch.mlp.call import MlpCall, Operands
from octavo_torch.mlp.forward import DrawnSeed, activation_again, forward, run_fused
from octavo_torch.scaling.seeds import SeedCounter
from octavo_torch.wgrad.function import interleaved_wgrad


class MlpContext(Context, Protocol):
    """The operands x, w1, a (the activation) and w2 are there where backward reads them."""

    call: MlpCall
    x: Saved
    w1: Saved
    a: Saved
    w2: Saved


class GroupedMLPFunction(torch.autograd.Function):
    """grouped_mlp with gradients of x, weights, probs, biases and bias2_scales, each only where it is asked for."""

    @staticmethod
    def forward(
        ctx: MlpContext,
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
        operands = Operands(x, w1, w2, probs, bias1, bias2, bias2_scales)
        result = forward(call, operands)
        call.release()
        tensors = [caller_sizes(call.sizes), None, None, None, None]
        if fc2.need_dx or (fc2.need_dw and not fc2.quantized_wgrad):
            tensors[1:3] = [result.h, probs]
        if bias2_scales is not None:
            tensors[3:] = [bias2, bias2_scales]
        if fc1.need_dw:
            ctx.x = Saved(result.x if fc1.quantized_wgrad else x, tensors)
        if fc1.need_dx:
            ctx.w1 = Saved(result.w1 if fc1.quantized_dgrad else w1, tensors)
        if fc2.need_dw and fc2.quantized_wgrad:
            ctx.a = Saved(result.a, tensors)
        if fc2.need_dx:
            ctx.w2 = Saved(result.w2 if fc2.quantized_dgrad else w2, tensors)
        ctx.save_for_backward(*tensors)
        ctx.call = call
        ctx.dtypes = dtypes_of(*operands, anchor)
        if out is not None:
            ctx.mark_dirty(out)
        return result.y

    @staticmethod
    def backward(ctx: MlpContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        check_no_graph(dy)
        with torch.no_grad():
            return (None, None, *run_backward(_backward, ctx, dy))


def _backward(ctx: MlpContext, dy: Tensor) -> list[Tensor | None]:
    call, tensors = ctx.call, ctx.saved_tensors
    plan = call.plan
    fc1, fc2 = plan.fc1, plan.fc2
    saved_sizes, h, probs, bias2, bias2_scales = tensors[:5]
    sizes = saved_sizes if isinstance(call.sizes, Tensor) else call.sizes
    needs = needed_gradients(ctx, ctx.needs_input_grad[2:], dy)
    need_x, need_w1, need_w2, need_p, need_b1, need_b2, need_s2, need_later = needs
    need_w1, need_w2 = (
        need or (need_later and layer.target is not None and layer.target.store is not None)
        for need, layer in ((need_w1, call.fc1), (need_w2, call.fc2))
    )
    dx = dw1 = dw2 = dp = db1 = db2 = ds2 = None
    seed1 = seed2 = None
    before_activation = need_x or need_w1 or need_p or need_b1
    rounds = need_w2 or before_activation
    if rounds and (fc1.needs_seed or fc2.needs_seed):
        seed1, seed2 = call.draw(SeedCounter.take)
    dy_of_caller = dy if call.grad_input is not None else None
    if dy.dtype is not fc2.row_dtype:
        dy = dy.to(fc2.row_dtype)
    if need_b2 or need_s2:
        sums = operators.bias_grads(dy, bounded_sizes(sizes, dy), bias2, bias2_scales)
        db2 = sums[0] if need_b2 else None
        ds2 = sums[1] if need_s2 else None
    codes: Matrix = dy
    if rounds and fc2.quantize_dy is not None:
        codes = quantize_operand(call.fc2, fc2.quantize_dy, "dy", dy, seed2)
    if need_w2:
        assert fc2.wgrad is not None  # a layer whose dw is needed
        rows = codes if fc2.quantized_wgrad else dy
        a = ctx.a.load(tensors) if fc2.quantized_wgrad else activation_again(call, h, probs, seed2)
        dw2 = weight_gradient(call.fc2, fc2.wgrad, a, rows, sizes, call)
        del a, rows
    if before_activation:
        assert fc2.dgrad is not None  # a layer whose dx is needed
        da = fc2.dgrad(codes if fc2.quantized_dgrad else dy, ctx.w2.load(tensors), sizes)
        if da.dtype is not h.dtype:
            da = da.to(h.dtype)
        del codes, dy
        if not (need_x or need_w1 or need_b1):
            dp = probs_gradient(da, h, plan.activation)
        else:
            grads = _gradient_of_h(call, da, h, probs, seed1, need_b1, need_p)
            db1, dp = grads.bias, grads.probs
            if need_x:
                assert fc1.dgrad is not None  # a layer whose dx is needed
                w1 = ctx.w1.load(tensors)
                if call.block and isinstance(w1, Tensor):
                    w1 = to_halves(w1, call.block)
                if call.grad_input is not None and dy_of_caller is not None:
                    check_grad_input(call.grad_input, dy_of_caller)
                dh = grads.codes if fc1.quantized_dgrad else grads.h
                assert dh is not None  # a GEMM reads it
                dx = fc1.dgrad(dh, w1, sizes, out=call.grad_input)
            if need_w1:
                assert fc1.wgrad is not None  # a layer whose dw is needed
                wgrad = interleaved_wgrad(fc1.wgrad, call.block) if call.block else fc1.wgrad
                dh = grads.codes if fc1.quantized_wgrad else grads.h
                assert dh is not None  # a GEMM reads it
                dw1 = weight_gradient(call.fc1, wgrad, ctx.x.load(tensors), dh, sizes, call)
            if db1 is not None and call.block:
                db1 = from_halves(db1, call.block)
    return cast_gradients((dx, dw1, dw2, dp, db1, db2, ds2, None), ctx.dtypes)


class _Gradients(NamedTuple):
    """The gradient of fc1's result as fc1's GEMMs read it, plain or quantized; those of its bias and of probs."""

    h: Tensor | None
    codes: GroupedTensor | None
    bias: Tensor | None
    probs: Tensor | None


def _gradient_of_h(
    call: MlpCall, da: Tensor, h: Tensor, probs: Tensor | None, seed: DrawnSeed, need_bias: bool, need_probs: bool
) -> _Gradients:
    plan, quantize = call.plan, call.plan.fc1.quantize_dy
    if plan.dact.run is not None:
        names = (("dbias", need_bias), ("dprobs", need_probs))
        extras = tuple([name for name, needed in names if needed])
        codes, computed = run_fused(call.fc1, plan.dact, "dy", (da, h), probs, seed, extras=extras)
        dp = computed.dprobs
        if need_probs and dp is None:
            dp = probs_gradient(da, h, plan.activation)
        return _Gradients(computed.activated, codes, computed.dbias, dp)
    dh = activate_gradient(da, h, probs, plan.activation)
    codes = None if quantize is None else quantize_operand(call.fc1, quantize, "dy", dh, seed)
    db = operators.bias_grads(dh, bounded_sizes(call.sizes, dh), None, None)[0] if need_bias else None
    return _Gradients(dh, codes, db, probs_gradient(da, h, plan.activation) if need_probs else None)


grouped_mlp_function: Callable[..., Tensor] = GroupedMLPFunction.apply
