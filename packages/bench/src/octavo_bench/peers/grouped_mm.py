"""torch's own grouped GEMM in bf16: `torch._grouped_mm`, all three GEMMs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from octavo.recipe_base import Gemm
from octavo_bench.harness.timing import Call

ALIGNED = 8
"""Rows of which each group has a multiple, where they are what is summed over."""


def check_aligned(sizes: Sequence[int], to: int = ALIGNED, what: str = "torch's wgrad") -> None:
    """ValueError where torch's grouped GEMM does not take sums of these lengths."""
    # torch asserts this on the device, which would end the process
    if any(size % to for size in sizes):
        raise ValueError(f"{what} needs group sizes in multiples of {to}")


def ends_of(sizes: Tensor) -> Tensor:
    """Where each group ends, as torch's grouped GEMMs take it."""
    return torch.cumsum(sizes, 0).to(torch.int32)


def inverse_of(order: Tensor) -> Tensor:
    """The order that brings rows back which `index_select` has put in this one."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """y[r] = x[r] @ w[g].T for x [M, K] and w [G, N, K]; differentiable."""
    return torch._grouped_mm(x, w.transpose(1, 2), offs=ends)


def moe_layer(x: Tensor, w1: Tensor, w2: Tensor, index: Tensor, weights: Tensor, *, added: bool = True) -> Tensor:
    """y [T, K] of a MoE layer for x [T, K], w1 [G, 2F, K], w2 [G, K, F], choices [T, k] and their weights.

    Two grouped GEMMs between index_select and what brings the rows back: added to the tokens, or gathered and summed.
    """
    flat, choices = index.view(-1), index.shape[1]
    experts = torch.arange(len(w1), device=index.device)
    order = torch.argsort(flat, stable=True)
    ends = torch.searchsorted(flat[order], experts, right=True, out_int32=True)
    tokens = order // choices
    gate, up = grouped(x.index_select(0, tokens), w1, ends).chunk(2, -1)
    a = silu(gate) * up * weights.view(-1)[order][:, None].to(gate.dtype)
    y = grouped(a, w2, ends)
    if added:
        return torch.zeros_like(x).index_add(0, tokens, y)
    return y.index_select(0, inverse_of(order)).view(-1, choices, y.shape[1]).sum(1)


def grouped_call(operands: dict[str, Tensor], sizes: Sequence[int], gemm: Gemm) -> Call:
    """One GEMM of x [M, K], w [G, N, K] and dy [M, N]."""
    x, w, dy = operands["x"], operands["w"], operands["dy"]
    ends = ends_of(torch.tensor(sizes, device=x.device))
    if gemm == "wgrad":
        check_aligned(sizes)
        return lambda: torch._grouped_mm(dy.t(), x, offs=ends)
    if gemm == "fprop":
        return lambda: grouped(x, w, ends)
    return lambda: torch._grouped_mm(dy, w, offs=ends)
