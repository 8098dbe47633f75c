"""A MoE layer as one node of autograd, from tokens to combined tokens.

Forward:   x by row -> fc1 -> h -> activation x weights -> fc2 -> rows summed by token
Backward:  dy by row -> fc2's gradients -> activation's gradient -> fc1's gradients -> dx summed by token

What is kept in between is the call's form: everything, or x by token and h, or h as codes, or x alone. Whatever else
backward reads is made again, by the functions that made it: routing, x by row and its column codes, the activation's
column codes, and on demand the weights' column codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo_torch.autograd.gradients import cast_gradients, dtypes_of, needed_gradients
from octavo_torch.autograd.saved_tensors import save
from octavo_torch.compiler.refused_derivatives import FirstOrderFunction, check_no_graph
from octavo_torch.linear.autograd import note_left_out
from octavo_torch.linear.contexts import run_backward
from octavo_torch.mlp.gradients import Needs, gradients
from octavo_torch.moe.call import MoeCall, MoeOperands
from octavo_torch.moe.forms import RowCodes
from octavo_torch.moe.forward import arrive, forward
from octavo_torch.moe.kept_operands import KeptOperands
from octavo_torch.moe.saved import MoeContext, saved_by


class MoeFunction(FirstOrderFunction):
    """moe_mlp with gradients of x, experts' weights, choices' weights and biases, each only where it is asked for."""

    @staticmethod
    def forward(
        ctx: MoeContext,
        call: MoeCall,
        choices: Tensor,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        weights: Tensor,
        bias1: Tensor | None,
        bias2: Tensor | None,
        anchor: Tensor | None,
    ) -> Tensor:
        """y [T, N]. `anchor`: see prepare.anchor_of."""
        dtypes = dtypes_of(x, w1, w2, weights, bias1, bias2, anchor)
        operands = MoeOperands(x, call.fc1.values_of(w1), call.fc2.values_of(w2), weights, bias1, bias2)
        choices, operands, arriving = arrive(call, choices, operands)
        result = forward(call, choices, operands, arriving)
        saved = saved_by(call, choices, operands, result)
        call.release()
        save(ctx, *saved.tensors)
        ctx.saved, ctx.call, ctx.freed = saved.places, call, False
        ctx.seeds = [None if isinstance(seed, Tensor) else seed for seed in result.seeds]
        ctx.reader = result.h.reader if isinstance(result.h, RowCodes) else None
        ctx.dtypes = dtypes
        return result.y

    @staticmethod
    def backward(ctx: MoeContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        check_no_graph(dy)
        with torch.no_grad():
            return (None, None, *run_backward(_backward, ctx, dy))


def _backward(ctx: MoeContext, dy: Tensor) -> list[Tensor | None]:
    need_x, need_w1, need_w2, need_weights, need_b1, need_b2, later = needed_gradients(
        ctx, ctx.needs_input_grad[2:], dy
    )
    note_left_out(ctx, later, ctx.call.fc1, ctx.call.fc2)
    of_bias2 = need_weights and ctx.dtypes[5] is not None
    needs = Needs(need_x, need_w1, need_w2, need_weights, need_b1, need_b2, of_bias2, later)
    moves, token_exchange = ctx.call.moves, ctx.call.token_exchange
    operands = KeptOperands(ctx, dy)
    grads = gradients(ctx.call, needs, operands)
    _, position, routed = operands.places
    dprobs = _sum(grads.probs, grads.bias2_scales)
    if dprobs is not None:
        by_choice = moves.weights.combine_rows(dprobs[:, None], position.view(-1, 1), routed.view(-1, 1), None)
        dprobs = by_choice.view(position.shape)
        if token_exchange is not None:
            dprobs = token_exchange.combine_weights(dprobs)
    return cast_gradients((grads.x, grads.w1, grads.w2, dprobs, grads.bias1, grads.bias2, None), ctx.dtypes)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return first if second is None else second if first is None else first + second


moe_function: Callable[..., Tensor] = MoeFunction.apply
