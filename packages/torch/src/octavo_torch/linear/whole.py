"""Layers that one backend runs whole: the forward is one call of it, the backward another, with autograd around them.

Seeds are read and gradients cast inline here, not by the helpers in `autograd.py`, because such a layer takes only tens
of microseconds, of which each further call of a Python function is a noticeable part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from octavo_torch.autograd.gradients import Context, needed_gradients
from octavo_torch.autograd.saved_tensors import save, saved_tensors
from octavo_torch.compiler.refused_derivatives import FirstOrderFunction, check_no_graph
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.compiler.transforms import is_wrapped
from octavo_torch.dispatch.layer import Layer
from octavo_torch.linear.call import Call, WholePasses
from octavo_torch.linear.contexts import run_backward
from octavo_torch.scaling.delayed_state import DelayedState
from octavo_torch.scaling.seeds import SeedCounter
from octavo_torch.wgrad.bias_gradients import bias_gradients

_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling


def whole_passes_for(
    layer: Layer, x: Tensor, w: Tensor, bias: Tensor | None, state: DelayedState | None
) -> WholePasses | None:
    """The layer's whole passes; None if it has none, or if they do not take these tensors.

    They take plain tensors, not those of a compiler or a transform, in the memory order that they read.
    """
    whole = layer.whole
    if (
        whole is not None
        and is_plain(x)
        and is_plain(w)
        and not (is_wrapped(x) or is_wrapped(w))
        and not (bias is not None and is_wrapped(bias))
        and whole.takes(x, w, bias, state)
    ):
        return whole
    return None


def whole_forward(call: Call, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """y, and the codes that backward reads."""
    seed, sizes = call.seed, call.sizes
    assert isinstance(sizes, Tensor)  # composed layers alone prepare theirs
    drawn = None
    if call.layer.stochastic_forward:
        drawn = seed.current() if isinstance(seed, SeedCounter) else seed
    y, codes, call.rest = call.whole.forward(x, w, sizes, bias, drawn, call.state, call.record, call.group_offset)
    return y, codes


def _whole_backward(
    call: Call, dy: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dw, each where it is needed."""
    codes, x, w = saved
    seed, drawn = call.seed, None
    if call.layer.quantize_dy is not None:
        drawn = seed.take() if isinstance(seed, SeedCounter) else seed
    return call.whole.backward(dy, x, w, codes, call.rest, needed, drawn)


# compiled autograd traces the backward of a forward that was eager
_beside_graph: Callable[..., tuple[Tensor | None, Tensor | None]] = torch.compiler.disable(_whole_backward)  # type: ignore[no-untyped-call]


class WholeContext(Context, Protocol):
    """autograd's ctx of a layer that runs whole."""

    call: Call


class WholeLayerFunction(FirstOrderFunction):
    """A whole layer with gradients of x, weight and bias, of which only those asked for are computed."""

    @staticmethod
    def forward(ctx: WholeContext, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y [M, N]."""
        values = call.values_of(weight)
        y, codes = whole_forward(call, x, values, bias)
        whole = call.whole
        save(ctx, codes, x if whole.keeps_x else None, values if whole.keeps_w else None)
        call.w_values = None
        ctx.call = call
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    def backward(ctx: WholeContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        if not _grad_enabled():
            return (None, *run_backward(_backward, ctx, dy))
        check_no_graph(dy)
        with torch.no_grad():
            return (None, *run_backward(_backward, ctx, dy))


def _backward(ctx: WholeContext, dy: Tensor) -> list[Tensor | None]:
    call = ctx.call
    need_x, need_w, need_b = needed_gradients(ctx, ctx.needs_input_grad[1:], dy)
    dx = dw = db = None
    if dy.dtype is not call.layer.row_dtype:
        dy = dy.to(call.layer.row_dtype)
    if need_b:
        db = bias_gradients(call.layer, dy, call.whole.sizes(call.rest)).bias
    if need_x or need_w:
        run = _beside_graph if _is_compiling() else _whole_backward
        dx, dw = run(call, dy, saved_tensors(ctx), (need_x, need_w))
    return [
        grad if grad is None or dtype is None or grad.dtype is dtype else grad.to(dtype)
        for grad, dtype in zip((dx, dw, db), ctx.dtypes, strict=True)
    ]


# not Function.apply itself, which first looks for functorch's tensors: whole_passes_for has
whole_layer_function: Callable[..., Tensor] = super(torch.autograd.Function, WholeLayerFunction).apply
