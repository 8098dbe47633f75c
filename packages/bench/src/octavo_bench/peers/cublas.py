"""cuBLAS's dense products in bf16: one of equal FLOPs, and a batch with a weight matrix for each group.

One product [M, K] x [K, N] shows the rate of the tensor cores: its one weight matrix stays in the cache. A batch of G
products of M / G rows reads and writes what a grouped GEMM with even groups does, so it is what such a GEMM is held to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.recipe_base import Gemm
from octavo_bench.harness.timing import Call


def parts(rows: Tensor, groups: int) -> Tensor:
    """[M, C] as [G, M / G, C]; ValueError where the rows are not divided evenly."""
    if len(rows) % groups:
        raise ValueError(f"a batch needs equal parts; {len(rows)} rows are not a multiple of {groups} groups")
    return rows.view(groups, len(rows) // groups, rows.shape[1])


def dense_call(x: Tensor, w: Tensor) -> Call:
    """One product, [M, K] x [N, K]^T."""
    out = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device)
    return lambda: torch.mm(x, w.t(), out=out)


def batches(operands: dict[str, Tensor], gemm: Gemm) -> tuple[Tensor, Tensor]:
    """What a GEMM of x [M, K], w [G, N, K] and dy [M, N] multiplies, as G pairs of matrices with M / G of the rows."""
    x, w, dy = operands["x"], operands["w"], operands["dy"]
    if gemm == "fprop":
        return parts(x, len(w)), w.transpose(1, 2)
    if gemm == "dgrad":
        return parts(dy, len(w)), w
    return parts(dy, len(w)).transpose(1, 2), parts(x, len(w))


def batched_call(operands: dict[str, Tensor], gemm: Gemm) -> Call:
    """`torch.bmm` of the batches."""
    left, right = batches(operands, gemm)
    out = torch.empty(len(left), left.shape[1], right.shape[2], dtype=left.dtype, device=left.device)
    return lambda: torch.bmm(left, right, out=out)
