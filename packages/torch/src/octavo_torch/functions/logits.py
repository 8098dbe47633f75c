"""router_logits: a router's product in fp32, forward and backward, with autocast on or off."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

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

    Gradients are products in fp32, too. A backward may run with autocast on although its forward ran with it off: where
    `backward` is called inside of autocast, and where a compiled graph was called there, since its backward always runs
    under the autocast of that call.
    """
    x, router = x.float(), router.float()
    with _no_autocast(x):
        if transforms_active() or forward_ad._current_level >= 0:  # a Function needs a rule for either
            return linear(x, router)
        logits: Tensor = _Product.apply(x, router)  # type: ignore[no-untyped-call]
    return logits


def _no_autocast(like: Tensor) -> AbstractContextManager[object]:
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, router: Tensor) -> Tensor:
        ctx.save_for_backward(x, router)
        return linear(x, router)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (dy,), (x, router) = grads, ctx.saved_tensors
        with _no_autocast(dy):
            dx = dy @ router if ctx.needs_input_grad[0] else None
            return dx, dy.t() @ x if ctx.needs_input_grad[1] else None
