"""torch's own FP8 products: `_scaled_grouped_mm` with one scale per row, `_scaled_mm` (cuBLAS) with one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.recipe_base import Gemm
from octavo_bench.harness.timing import Call
from octavo_bench.peers.cublas import batches
from octavo_bench.peers.grouped_mm import check_aligned, ends_of

ALIGNED = 16


def scaled_grouped_call(operands: dict[str, Tensor], sizes: Sequence[int], gemm: Gemm, *, fast: bool) -> Call:
    """One grouped GEMM of the operands' E4M3 codes."""
    x, w, dy = operands["x"], operands["w"], operands["dy"]
    ends = ends_of(torch.tensor(sizes, device=x.device))
    groups, n, k = w.shape
    scales: tuple[Any, Any]
    if gemm == "wgrad":
        check_aligned(sizes, ALIGNED, "torch's FP8 wgrad")
        left, right = _codes(dy.t().contiguous()), _codes(x.t().contiguous()).t()
        scales = groups * n, groups * k
    else:
        forward = gemm == "fprop"
        left = _codes(x if forward else dy)
        right = _codes(w if forward else w.transpose(1, 2).contiguous()).transpose(1, 2)
        scales = len(x), (groups, n if forward else k)
    one, two = (torch.ones(side, dtype=torch.float32, device=x.device) for side in scales)
    return lambda: torch._scaled_grouped_mm(
        left, right, one, two, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def scaled_call(x: Tensor, w: Tensor, *, fast: bool) -> Call:
    """One dense product of codes, [M, K] x [N, K]^T."""
    return _product(_codes(x), _codes(w).t(), fast)


def scaled_batched_call(operands: dict[str, Tensor], gemm: Gemm, *, fast: bool) -> Call:
    """G dense products of equal size, each with a weight matrix of its own, one after another.

    cuBLAS multiplies batches of FP8 matrices, and torch offers no way to it: so this is a call for each group, and each
    of them ends with a wave that is not full.
    """
    left, right = batches(operands, gemm)
    # cuBLAS takes the left operand by rows and the right one by columns
    rows, columns = _codes(left.contiguous()), _codes(right.transpose(1, 2).contiguous()).transpose(1, 2)
    products = [_product(one, two, fast) for one, two in zip(rows.unbind(), columns.unbind(), strict=True)]

    def call() -> None:
        for product in products:
            product()

    return call


def _product(left: Tensor, right: Tensor, fast: bool) -> Call:
    one = torch.ones((), dtype=torch.float32, device=left.device)
    return lambda: torch._scaled_mm(
        left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _codes(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn)
