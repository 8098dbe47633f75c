"""DeepGEMM's grouped GEMMs: FP8 in 1x128 and 128x128 blocks, and bf16, as its interface of 2.x takes them.

fprop and dgrad are m-grouped in its contiguous layout, into bf16; wgrad is k-grouped and adds to fp32. All of them take
groups in multiples of one alignment, so other sizes have no DeepGEMM beside them. Scales are given in the layout that
its kernels read, so that nothing is transposed in what is timed. Kernels are compiled when a call is made first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.recipe_base import Gemm
from octavo_bench.harness.timing import Call
from octavo_bench.peers.compile import e4m3, power_of_two
from octavo_bench.peers.loading import loaded

LIBRARY = "DeepGEMM"
BLOCK = 128
FUNCTIONS = {
    ("fp8", "fprop"): "m_grouped_fp8_gemm_nt_contiguous",
    ("fp8", "dgrad"): "m_grouped_fp8_gemm_nt_contiguous",
    ("fp8", "wgrad"): "k_grouped_fp8_gemm_nt_contiguous",
    ("bf16", "fprop"): "m_grouped_bf16_gemm_nt_contiguous",
    ("bf16", "dgrad"): "m_grouped_bf16_gemm_nn_contiguous",
    ("bf16", "wgrad"): "k_grouped_bf16_gemm_tn_contiguous",
}
"""What computes each GEMM, by the type of its operands."""

_ALIGNMENT = "get_mk_alignment_for_contiguous_layout"
_ACROSS, _DOWN, _SQUARE = (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)
Coded = tuple[Tensor, Tensor]
"""Codes and their decode scales in fp32."""


def deepgemm_call(operands: dict[str, Tensor], sizes: Sequence[int], gemm: Gemm, *, dtype: str) -> Call:
    """One GEMM of x [M, K], w [G, N, K] and dy [M, N] in "fp8" or "bf16"; wgrad is added to zeros at first.

    AbsentError without a DeepGEMM that has the function; ValueError for sizes that its layout does not take.
    """
    name = FUNCTIONS[dtype, gemm]
    library = loaded(LIBRARY, "deep_gemm", (name, _ALIGNMENT))
    step: int = getattr(library, _ALIGNMENT)()
    if any(size % step for size in sizes):
        raise ValueError(f"not comparable: its layout takes groups in multiples of {step} rows")
    run = getattr(library, name)
    x, w, dy = operands["x"], operands["w"], operands["dy"]
    rows = torch.tensor(sizes, dtype=torch.int32, device=x.device)
    if gemm == "wgrad":
        sums = torch.zeros(w.shape, dtype=torch.float32, device=w.device)
        left, right = (dy, x) if dtype == "bf16" else (_columns(dy, sizes), _columns(x, sizes))
        lengths = list(sizes)

        def add() -> Tensor:
            run(left, right, sums, lengths, rows, sums)
            return sums

        return add
    forward = gemm == "fprop"
    a, b = (x, w) if forward else (dy, w)
    out = torch.empty(len(a), w.shape[1 if forward else 2], dtype=a.dtype, device=a.device)
    group_of_row = torch.repeat_interleave(torch.arange(len(w), device=a.device), rows.long()).to(torch.int32)
    pair: tuple[Any, Any] = (a, b) if dtype == "bf16" else (_rows(a), _weights(b, turned=not forward))

    def product() -> Tensor:
        run(*pair, out, group_of_row)
        return out

    return product


def _rows(values: Tensor) -> Coded:
    """[M, K] in blocks of 1x128; scales [M, K / 128] that lie by columns."""
    codes, scales = _coded(values, _ACROSS)
    by_columns = torch.empty_strided(scales.shape, (1, len(scales)), dtype=scales.dtype, device=scales.device)
    return codes, by_columns.copy_(scales)


def _weights(w: Tensor, *, turned: bool) -> Coded:
    """[G, N, K] in blocks of 128x128, or as [G, K, N] where the product needs it with K outside."""
    pairs = [_coded(one, _SQUARE) for one in w.unbind()]
    codes, scales = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    return (codes.transpose(1, 2).contiguous(), scales.transpose(1, 2).contiguous()) if turned else (codes, scales)


def _columns(values: Tensor, sizes: Sequence[int]) -> Coded:
    """[M, C] in blocks of 128x1: each group's codes as [C, rows], one after another; scales [C, M / 128]."""
    codes, scales = _coded(values, _DOWN)
    return torch.cat([group.t().reshape(-1) for group in torch.split(codes, list(sizes))]), scales.t()


def _coded(values: Tensor, block: tuple[int, int]) -> Coded:
    """E4M3 codes [R, C] and a power of two for each block; blocks at the ends may have fewer rows and columns."""
    rows, cols = values.shape
    down, across = block
    filled = pad(values.float(), (0, -cols % across, 0, -rows % down))
    blocks = filled.view(filled.shape[0] // down, down, filled.shape[1] // across, across)
    encode = power_of_two(blocks.abs().amax((1, 3), keepdim=True))
    codes = e4m3(blocks * encode).view(filled.shape)[:rows, :cols].contiguous()
    return codes, (1 / encode)[:, 0, :, 0].contiguous()
