"""The forward and backward of a grouped MLP.

Forward:   x quantized -> fc1 -> h -> activation x probs + quantize -> fc2 -> y
Backward:  dy quantized -> fc2's dgrad and wgrad -> activation's gradient + bias gradient + quantize -> fc1's

Saved for backward, in bytes per element of a bf16 call whose recipe has codes of one byte (scales aside): 1 of x, 2 of
h, 1 of the activation, 1 of each weight. An activation that wgrad reads in high precision is computed again. Unless the
graph is retained, backward frees h and the codes that forward has made, each as soon as nothing else will read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from octavo_torch.autograd.gradients import Context, cast_gradients, dtypes_of, needed_gradients
from octavo_torch.autograd.saved import Saved, caller_sizes, free_saved, may_free
from octavo_torch.autograd.saved_tensors import save, saved_tensors
from octavo_torch.compiler.refused_derivatives import FirstOrderFunction, check_no_graph
from octavo_torch.dispatch.layer_functions import Matrix
from octavo_torch.linear.autograd import note_left_out
from octavo_torch.linear.contexts import run_backward
from octavo_torch.mlp.call import MlpCall, Operands
from octavo_torch.mlp.forward import DrawnSeed, activation_again, forward
from octavo_torch.mlp.gradients import Needs, check_whole, gradients


class MlpContext(Context, Protocol):
    """autograd's ctx of a grouped MLP. x, w1, a (the activation) and w2 are set only if the backward reads them.

    freed   whether a backward that has not ended has freed what it has read
    """

    call: MlpCall
    freed: bool
    x: Saved
    w1: Saved
    a: Saved
    w2: Saved


class GroupedMLPFunction(FirstOrderFunction):
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
        """y [M, N], written into `out` if it is given. `anchor`: see prepare.anchor_of."""
        plan = call.plan
        fc1, fc2 = plan.fc1, plan.fc2
        dtypes = dtypes_of(x, w1, w2, probs, bias1, bias2, bias2_scales, anchor)
        w1, w2 = call.fc1.values_of(w1), call.fc2.values_of(w2)
        operands = Operands(x, w1, w2, probs, bias1, bias2, bias2_scales)
        own_x, own_w1, own_w2 = (codes is None for codes in (call.fc1.x_codes, call.fc1.w_codes, call.fc2.w_codes))
        result = forward(call, operands)
        call.release()
        tensors = [caller_sizes(call.sizes), None, None, None, None]
        if fc2.need_dx or (fc2.need_dw and not fc2.quantized_wgrad):
            tensors[1:3] = [result.h, probs]
        if bias2_scales is not None:
            tensors[3:] = [bias2, bias2_scales]
        if fc1.need_dw:
            ctx.x = Saved(result.x if fc1.quantized_wgrad else x, tensors, own_x)
        if fc1.need_dx:
            ctx.w1 = Saved(result.w1 if fc1.quantized_dgrad else w1, tensors, own_w1, fc1.w_planes.dgrad)
        if fc2.need_dw and fc2.quantized_wgrad:
            ctx.a = Saved(result.a, tensors, own=True)
        if fc2.need_dx:
            ctx.w2 = Saved(result.w2 if fc2.quantized_dgrad else w2, tensors, own_w2, fc2.w_planes.dgrad)
        save(ctx, *tensors)
        ctx.call, ctx.freed, ctx.dtypes = call, False, dtypes
        if out is not None:
            ctx.mark_dirty(out)
        return result.y

    @staticmethod
    def backward(ctx: MlpContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        check_no_graph(dy)
        with torch.no_grad():
            return (None, None, *run_backward(_backward, ctx, dy))


class _SavedOperands:
    """The BackwardOperands of a grouped MLP: what its forward has saved, and dy."""

    def __init__(self, ctx: MlpContext, dy: Tensor) -> None:
        check_whole(ctx.freed)
        self._ctx, self._dy, self._tensors, self._frees = ctx, [dy], saved_tensors(ctx), may_free(dy)
        sizes, self._h, self.probs, self.bias2, self.bias2_scales = self._tensors[:5]
        self.sizes = sizes if isinstance(ctx.call.sizes, Tensor) else ctx.call.sizes

    holds_dy, awaits_dy = True, False
    dy_of_tokens = None

    def dy(self) -> Tensor:
        return self._dy.pop()

    def h(self) -> Tensor:
        return self._h

    def x(self) -> Matrix:
        return self._ctx.x.load(self._tensors)

    def a(self, h: Tensor, seed: DrawnSeed) -> Matrix:
        call = self._ctx.call
        if call.plan.fc2.quantized_wgrad:
            return self._ctx.a.load(self._tensors)
        return activation_again(call, h, self.probs, seed)

    def w1(self) -> Matrix:
        return self._ctx.w1.load(self._tensors)

    def w2(self) -> Matrix:
        return self._ctx.w2.load(self._tensors)

    def of_x(self, dx: Tensor) -> Callable[[], Tensor]:
        return lambda: dx

    def done_with(self, name: Literal["h", "x", "a", "w1", "w2"]) -> None:
        if not self._frees:
            return
        self._ctx.freed = True
        if name == "h":
            free_saved(self._h)
        elif name != "a" or self._ctx.call.plan.fc2.quantized_wgrad:
            saved: Saved = getattr(self._ctx, name)
            saved.free(self._tensors)


def _backward(ctx: MlpContext, dy: Tensor) -> list[Tensor | None]:
    needs = Needs(*needed_gradients(ctx, ctx.needs_input_grad[2:], dy))
    note_left_out(ctx, needs.later, ctx.call.fc1, ctx.call.fc2)
    found = gradients(ctx.call, needs, _SavedOperands(ctx, dy))
    ctx.freed = False  # it has ended: autograd refuses another one in its own words
    return cast_gradients((*found, None), ctx.dtypes)


grouped_mlp_function: Callable[..., Tensor] = GroupedMLPFunction.apply
