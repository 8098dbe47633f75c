"""Second derivatives of grouped layers, which are refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from octavo_torch.compiler.tracing import is_plain


def refuse() -> NotImplementedError:
    """The error."""
    return NotImplementedError(
        "a grouped layer has no second derivative: quantization is a step function, whose derivative is zero or "
        "undefined; compute this term with torch.nn.functional.linear per group instead"
    )


class _Once(torch.autograd.Function):
    """The identity, whose derivative is refused."""

    @staticmethod
    def forward(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> Tensor:
        """`grad` itself."""
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: FunctionCtx, *_: Tensor) -> Any:
        """Raises NotImplementedError."""
        raise refuse()


_once: Callable[[Tensor, Tensor], Tensor] = _Once.apply


def once_differentiated(grads: Sequence[Tensor | None], dy: Tensor) -> list[Tensor | None]:
    """`grads`, whose own derivatives raise NotImplementedError where backward was asked for a graph (create_graph)."""
    if not torch.is_grad_enabled() or not is_plain(dy):
        return list(grads)
    # they depend on the layer's inputs, too, so a graph from dy alone would drop terms where dy is a constant
    anchor = dy.new_zeros(()).requires_grad_()
    return [None if grad is None else _once(grad, anchor) for grad in grads]
