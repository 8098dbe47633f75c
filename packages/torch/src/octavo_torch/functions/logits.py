"""A router's product in fp32, forward and backward, whatever autocast says meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import linear

from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.tracing import one_call
from octavo_torch.compiler.transforms import transforms_active


@one_call
def router_logits(x: Tensor, router: Tensor) -> Tensor:
    """fp32 x router^T [T, E] of tokens x [T, K] and a router [E, K].

    Gradients are products in fp32, too, where a backward runs inside of autocast: a user's call of `backward` does
    where it stands there, and that of a compiled graph always, if autocast was on around its call.
    """
    x, router = x.float(), router.float()
    if not torch.is_autocast_enabled(x.device.type):
        return linear(x, router)
    with torch.autocast(x.device.type, enabled=False):
        if transforms_active() or forward_ad._current_level >= 0:  # a Function needs a rule for either
            return linear(x, router)
        logits: Tensor = _Product.apply(x, router)  # type: ignore[no-untyped-call]
    return logits


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, router: Tensor) -> Tensor:
        ctx.save_for_backward(x, router)
        return linear(x, router)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (dy,), (x, router) = grads, ctx.saved_tensors
        with torch.autocast(dy.device.type, enabled=False):
            dx = dy @ router if ctx.needs_input_grad[0] else None
            return dx, dy.t() @ x if ctx.needs_input_grad[1] else None
