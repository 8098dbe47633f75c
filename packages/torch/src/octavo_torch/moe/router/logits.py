"""router_logits: a router's product in fp32, forward and backward, with autocast on or off.

Tensor cores have no product of fp32, and without them it takes ten times as long as one of bf16. But bf16 times bf16 is
exact in fp32, and an fp32 value is the sum of three of bf16, each with the next 8 of its 24 bits. So on CUDA, where the
tokens are bf16, each product is one of bf16 that tensor cores sum in fp32, over a few matrices side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import linear

from octavo_torch.arithmetic.parts import bf16_parts
from octavo_torch.autograd.saved_tensors import save, saved_tensors
from octavo_torch.compiler.autocast import without_autocast
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.compiler.refused_derivatives import wants_graph
from octavo_torch.compiler.tracing import one_call
from octavo_torch.compiler.transforms import functionalizing, is_batched, transforms_active
from octavo_torch.dispatch.device import arch_of

_BY_TENSOR_CORES = (torch.bfloat16, torch.float32)
_FIRST_ARCH = (8, 0)  # whose tensor cores multiply bf16


@one_call
def router_logits(x: Tensor, router: Tensor) -> Tensor:
    """fp32 x router^T [T, E] of tokens x [T, K] and a router [E, K].

    Gradients are products in fp32, too, rounded to the dtypes of x and router. What is kept for them is x and router as
    they are. Products of fp32 and of fp16 tokens on CUDA are TF32 where the process has allowed that.

    A backward may run with autocast on although its forward ran with it off: where `backward` or torch.func.grad is
    called inside of autocast, and where a compiled graph was called there, since its backward always runs under the
    autocast of that call.
    """
    with without_autocast(x.device.type):
        return _product(x, router)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left right^T, whose gradients are such products, too."""
    if forward_ad._current_level >= 0 or functionalizing():  # a Function has no rule for either
        return _plain(left, right)
    kind = _TransformedProduct if transforms_active() else _Product
    made: Tensor = kind.apply(left, right)  # type: ignore[no-untyped-call]
    return made


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, router: Tensor) -> Tensor:
        save(ctx, x, router)
        if _by_tensor_cores(x, router):
            return logits_by_parts(x, router)
        return _plain(x, router)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (dy,), (x, router) = grads, saved_tensors(ctx)
        wants_x, wants_router = ctx.needs_input_grad
        product = _product if wants_graph(dy) else _plain
        # of many gradients at once, and to be differentiated again: torch has no rule for parts, nor for their product
        parts = _by_tensor_cores(x, router) and product is _plain and not any(map(is_batched, (dy, x, router)))
        dx = drouter = None
        with without_autocast(dy.device.type):
            if wants_x:
                dx = (dx_by_parts(dy, router) if parts else product(dy, router.t())).to(x.dtype)
            if wants_router:
                drouter = (drouter_by_parts(dy, x) if parts else product(dy.t(), x.t())).to(router.dtype)
        return dx, drouter


class _TransformedProduct(_Product):
    """In the form that torch.func's transforms take, for which torch takes 20 microseconds more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, router: Tensor) -> Tensor:  # type: ignore[override]
        return _plain(x, router)

    @staticmethod
    def setup_context(ctx: AutogradContext, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        save(ctx, *inputs)


def _plain(left: Tensor, right: Tensor) -> Tensor:
    """left right^T in fp32."""
    return linear(left.float(), right.float())


def _by_tensor_cores(x: Tensor, router: Tensor) -> bool:
    if not x.is_cuda or x.dtype is not torch.bfloat16 or router.dtype not in _BY_TENSOR_CORES or x.numel() == 0:
        return False
    arch = arch_of(x.device)  # AMD's devices are "cuda", too, and torch has no such product there
    return torch.version.hip is None and arch is not None and arch >= _FIRST_ARCH


def logits_by_parts(x: Tensor, router: Tensor) -> Tensor:
    """`router_logits` of tokens in bf16: [T, K] times the parts of the router side by side."""
    parts = bf16_parts(router)
    if len(parts) == 1:
        return _sums(x, router.t())
    return _sums(x, torch.cat(parts).t()).view(len(x), len(parts), len(router)).sum(1)


def dx_by_parts(dy: Tensor, router: Tensor) -> Tensor:
    """dy router, fp32 [T, K], of the logits' gradient dy [T, E]: pairs of parts one behind the other along E.

    Of two matrices in three parts each the pairs below 2^-24 of the product are left out.
    """
    left, right = bf16_parts(dy), bf16_parts(router)
    pairs = [(one, other) for i, one in enumerate(left) for j, other in enumerate(right) if i + j < len(left)]
    return _sums(torch.cat([one for one, _ in pairs], 1), torch.cat([other for _, other in pairs]))


def drouter_by_parts(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x, fp32 [E, K], of tokens in bf16."""
    parts = bf16_parts(dy)
    return _sums(torch.cat(parts, 1).t(), x).view(len(parts), dy.shape[1], x.shape[1]).sum(0)


def _sums(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices of bf16, summed in fp32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()  # for tests of what stands around it
