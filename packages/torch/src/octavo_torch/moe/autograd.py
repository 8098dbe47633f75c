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
from octavo_torch.autograd.saved_tensors import save, saved_tensors
from octavo_torch.compiler.refused_derivatives import FirstOrderFunction, check_no_graph
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.linear import contexts
from octavo_torch.linear.autograd import note_left_out
from octavo_torch.mlp.gradients import Needs, check_not_freed
from octavo_torch.moe.call import MoeCall, MoeOperands
from octavo_torch.moe.forward import arrive
from octavo_torch.moe.passes import run_backward, run_forward
from octavo_torch.moe.saved import MoeContext

_is_compiling = torch.compiler.is_compiling


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
        """y [T, N]. `anchor`: see parameters.anchor_of."""
        dtypes = dtypes_of(x, w1, w2, weights, bias1, bias2, anchor)
        operands = MoeOperands(x, call.fc1.values_of(w1), call.fc2.values_of(w2), weights, bias1, bias2)
        choices, operands, arriving = arrive(call, choices, operands)
        (y, tensors, ctx.kept), ctx.recorded = run_forward(call, choices, operands, arriving)
        call.release()
        save(ctx, *tensors)
        ctx.call, ctx.freed, ctx.dtypes = call, False, dtypes
        return y

    @staticmethod
    def backward(ctx: MoeContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        check_no_graph(dy)
        with torch.no_grad():
            return (None, None, *contexts.run_backward(_backward, ctx, dy))


# compiled autograd traces the backward of a forward that was eager, and what it traces has no addresses
_beside_graph = torch.compiler.disable(run_backward)  # type: ignore[no-untyped-call]


def _backward(ctx: MoeContext, dy: Tensor) -> list[Tensor | None]:
    need_x, need_w1, need_w2, need_weights, need_b1, need_b2, postponed = needed_gradients(
        ctx, ctx.needs_input_grad[2:], dy
    )
    note_left_out(ctx, postponed, ctx.call.fc1, ctx.call.fc2)
    of_bias2 = need_weights and ctx.dtypes[5] is not None
    needs = Needs(need_x, need_w1, need_w2, need_weights, need_b1, need_b2, of_bias2, postponed)
    check_not_freed(ctx.freed)
    run = _beside_graph if _is_compiling() and is_plain(dy) else run_backward
    found = run(ctx, saved_tensors(ctx), dy, needs)
    ctx.freed = False  # it has ended: autograd refuses another one in its own words
    return cast_gradients((*found, None), ctx.dtypes)


moe_function: Callable[..., Tensor] = MoeFunction.apply
