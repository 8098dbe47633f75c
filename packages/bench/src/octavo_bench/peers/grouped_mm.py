"""torch's own grouped GEMM in bf16: `torch._grouped_mm`, all three GEMMs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
