"""A stand-in for DeepGEMM, which needs a GPU: it computes in fp32 with torch, and checks what it is given.

Each function refuses operands that are not as the library documents them, so that an adapter that hands over another
layout fails here. Nothing here says that the library itself accepts the adapter's call.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
Coded = tuple[Tensor, Tensor]


def deep_gemm(alignment: int = BLOCK) -> ModuleType:
    """A `deep_gemm` whose contiguous layout takes groups in multiples of `alignment`; SM90's layouts."""
    module: Any = ModuleType("deep_gemm")
    module.__version__ = "2.6.1"
    module.calls = []

    def said(name: str) -> None:
        module.calls.append(name)

    def group_rows(layout: Tensor, rows: int, groups: int) -> list[Tensor]:
        assert layout.dtype is torch.int32
        assert layout.shape == (rows,)
        assert layout.is_contiguous()
        found = [torch.nonzero(layout == group)[:, 0] for group in range(groups)]
        assert torch.equal(torch.cat(found), torch.arange(rows)), "groups are not one after another"
        assert all(len(one) % alignment == 0 for one in found), "a group is not aligned"
        return found

    def m_grouped(a: Tensor, b: Tensor, d: Tensor, layout: Tensor) -> None:
        """d[r] = a[r] @ b[g].T for values a [M, K] and b [G, N, K]."""
        assert d.shape == (len(a), b.shape[1])
        assert d.dtype is torch.bfloat16
        assert d.is_contiguous()
        for group, rows in enumerate(group_rows(layout, len(a), len(b))):
            d[rows] = (a[rows].float() @ b[group].float().T).to(d.dtype)

    def m_grouped_fp8_gemm_nt_contiguous(a: Coded, b: Coded, d: Tensor, layout: Tensor) -> None:
        said("m_grouped_fp8_gemm_nt_contiguous")
        left = _decoded(a, (1, BLOCK))
        assert a[1].stride() == (1, len(a[0])), "scales of the left operand lie by columns"
        assert b[1].is_contiguous()
        right = torch.stack([_decoded(pair, (BLOCK, BLOCK)) for pair in zip(b[0], b[1], strict=True)])
        m_grouped(left, right, d, layout)

    def m_grouped_bf16_gemm_nt_contiguous(a: Tensor, b: Tensor, d: Tensor, layout: Tensor) -> None:
        said("m_grouped_bf16_gemm_nt_contiguous")
        assert a.dtype is b.dtype is torch.bfloat16
        m_grouped(a, b, d, layout)

    def m_grouped_bf16_gemm_nn_contiguous(a: Tensor, b: Tensor, d: Tensor, layout: Tensor) -> None:
        said("m_grouped_bf16_gemm_nn_contiguous")
        assert a.dtype is b.dtype is torch.bfloat16
        assert b.is_contiguous()
        m_grouped(a, b.transpose(1, 2), d, layout)

    def k_grouped(a: Sequence[Tensor], b: Sequence[Tensor], d: Tensor, rows: tuple[list[int], Tensor, Tensor]) -> None:
        """d[g] = c[g] + a[g] @ b[g].T for values [M, k_g] and [N, k_g] of each group."""
        lengths, on_device, c = rows
        assert all(length % alignment == 0 for length in lengths)
        assert on_device.dtype is torch.int32
        assert on_device.tolist() == lengths
        assert d.dtype is c.dtype is torch.float32
        assert d.is_contiguous()
        for group, (left, right) in enumerate(zip(a, b, strict=True)):
            d[group] = c[group] + left.float() @ right.float().T

    def k_grouped_fp8_gemm_nt_contiguous(
        a: Coded, b: Coded, d: Tensor, ks: list[int], ks_tensor: Tensor, c: Tensor
    ) -> None:
        said("k_grouped_fp8_gemm_nt_contiguous")
        sides = []
        for (codes, scales), width in ((a, d.shape[1]), (b, d.shape[2])):
            assert codes.shape == (sum(ks) * width,)
            assert scales.shape == (width, sum(ks) // BLOCK)
            assert scales.stride() == (1, width)
            groups = [part.view(width, -1) for part in codes.split([length * width for length in ks])]
            of_groups = scales.split([length // BLOCK for length in ks], 1)
            sides.append([_decoded(pair, (1, BLOCK)) for pair in zip(groups, of_groups, strict=True)])
        k_grouped(sides[0], sides[1], d, (ks, ks_tensor, c))

    def k_grouped_bf16_gemm_tn_contiguous(
        a: Tensor, b: Tensor, d: Tensor, ks: list[int], ks_tensor: Tensor, c: Tensor
    ) -> None:
        said("k_grouped_bf16_gemm_tn_contiguous")
        assert a.dtype is b.dtype is torch.bfloat16
        assert a.is_contiguous()
        assert b.is_contiguous()
        left, right = ([part.T for part in side.split(ks)] for side in (a, b))
        k_grouped(left, right, d, (ks, ks_tensor, c))

    for function in (
        m_grouped_fp8_gemm_nt_contiguous,
        m_grouped_bf16_gemm_nt_contiguous,
        m_grouped_bf16_gemm_nn_contiguous,
        k_grouped_fp8_gemm_nt_contiguous,
        k_grouped_bf16_gemm_tn_contiguous,
    ):
        setattr(module, function.__name__, function)
    module.get_mk_alignment_for_contiguous_layout = lambda: alignment
    return module


def _decoded(pair: Coded, block: tuple[int, int]) -> Tensor:
    """fp32 values of codes [R, C] with a scale for each block."""
    codes, scales = pair
    assert codes.dtype is torch.float8_e4m3fn
    assert codes.is_contiguous()
    assert scales.dtype is torch.float32
    assert scales.shape == tuple(-(-side // part) for side, part in zip(codes.shape, block, strict=True))
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]
