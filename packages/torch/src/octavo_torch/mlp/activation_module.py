"""Activation functions between grouped layers: differentiable, computed in fp32 and rounded once."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from octavo_registry.contract.cards import Activation as Name
from octavo_torch.arrays.dtypes import name_of
from octavo_torch.arrays.leading import LeadingAxes, has_other_rank
from octavo_torch.arrays.operands import check_tensor
from octavo_torch.autograd.saved_tensors import save, saved_tensors
from octavo_torch.autograd.transformed import transformed
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.refused_derivatives import check_no_graph, check_no_tangent
from octavo_torch.compiler.tracing import one_call
from octavo_torch.compiler.transforms import Subject, transforms_active
from octavo_torch.functions import activations
from octavo_torch.functions.activations import check_activation, features
from octavo_torch.linear.arguments import check_like

_ACTIVATE = Subject("activate", "rows may have any leading axes: give all of them in one call")


class _Context(AutogradContext, Protocol):
    name: str


class _Activate(torch.autograd.Function):
    """act(x) times probabilities, and both gradients."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, name: str, probs: Tensor | None) -> Tensor:
        save(ctx, x, probs)
        ctx.name = name
        return activations.activate(x, probs, name)

    @staticmethod
    def backward(ctx: _Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        check_no_graph(dy)
        x, probs = saved_tensors(ctx)
        with torch.no_grad():
            dx = activations.activate_gradient(dy, x, probs, ctx.name) if ctx.needs_input_grad[0] else None
            dprobs = activations.probs_gradient(dy, x, ctx.name) if ctx.needs_input_grad[2] else None
        return dx, None, dprobs


@one_call
def _activated(x: Tensor, name: str, probs: Tensor | None = None) -> Tensor:
    if transforms_active():
        return transformed(_activated, {"x": x, "name": name, "probs": probs}, _ACTIVATE)
    if forward_ad._current_level >= 0:
        check_no_tangent(x, probs, name="activate")
    y: Tensor = _Activate.apply(x, name, probs)  # type: ignore[no-untyped-call]
    return y


def activate(x: Tensor, activation: Name, *, probs: Tensor | None = None) -> Tensor:
    """act(x), or act(gate) * up where the activation is gated, times `probs` row by row.

    x           [M, F], or [M, 2 F] with the gate first for a gated activation; bf16, fp16 or fp32. Any other leading
                axes in M's place are those of probs and of the result, too
    activation  silu, gelu (with erf), gelu_tanh, relu2, swiglu, geglu, geglu_tanh or clamped_swiglu, gpt-oss's
                g * sigmoid(1.702 g) * (u + 1), with g = min(gate, 7) and u = up clamped to [-7, 7]
    probs       [M] float32

    Returns [M, F] in x's dtype, computed in fp32 and rounded once, as are the gradients of x and probs. Differentiable
    once. Raises ValueError for arguments that do not fit.
    """
    if has_other_rank(x):
        axes = LeadingAxes(x)
        return axes.restored(activate(axes.flat(x), activation, probs=axes.of_rows("probs", probs)))
    check_tensor("x", x, "[M, F]")
    name = check_activation(activation)
    features(x.shape[1], name, "x")
    if probs is None:
        return _activated(x, name)
    check_probs(probs, x)
    return _activated(x, name, probs)


def check_probs(probs: Tensor, x: Tensor) -> None:
    """ValueError unless `probs` is fp32 [M] for x's rows."""
    check_like("probs", probs, (x.shape[0],), x)
    if probs.dtype is not torch.float32:
        raise ValueError(f"probs has dtype {name_of(probs.dtype)}; give float32")


class Activation(nn.Module):
    """`activate` as a module: an operation of `Sequential`, which fuses it with the layers before and after it."""

    activation: Name

    def __init__(self, activation: Name = "swiglu") -> None:
        super().__init__()
        self.activation = check_activation(activation)

    def forward(self, x: Tensor, probs: Tensor | None = None) -> Tensor:
        """[M, F]: see octavo_torch.activate."""
        return activate(x, self.activation, probs=probs)

    def extra_repr(self) -> str:
        """The activation's name."""
        return self.activation
