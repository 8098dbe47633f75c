"""Launches, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo_triton.kernels.device import INTERPRETED

DEFAULTS = {"num_warps": 16, "enable_fp_fusion": False}
"""What a launch has unless it says otherwise: the definition rounds after each operation, so nothing is contracted."""


def start(kernel: Any, grid: tuple[int, ...], like: Tensor, arguments: tuple[Any, ...], **constants: Any) -> None:
    """`kernel` on `like`'s device and current stream; a grid without programs starts nothing."""
    if not all(grid):
        return
    with _place(like):
        if not INTERPRETED and any(
            isinstance(argument, (TensorDescriptor, SharedDescriptor)) for argument in arguments
        ):
            # encoding one needs a context that is current in this thread, which may not have used CUDA before
            torch.cuda.set_device(like.device.index)
        kernel[grid](*arguments, **{**DEFAULTS, **constants})


def _place(like: Tensor) -> AbstractContextManager[object]:
    if INTERPRETED:
        # NumPy warns of what fp32 does on a GPU, too: x * scale may overflow before it saturates
        return np.errstate(all="ignore")
    if like.is_cuda and like.device.index != torch.cuda.current_device():
        return torch.cuda.device(like.device)
    return nullcontext()


def has_fp8_casts(like: Tensor) -> bool:
    """Whether `like`'s chip has instructions that round to FP8: sm_89 and later ones."""
    return not INTERPRETED and _capability(like.device.index) >= (8, 9)


@lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@lru_cache(maxsize=64)
def multiprocessors(index: int) -> int:
    """Of CUDA device `index`."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def _can_be_fetched(x: Tensor) -> bool:
    if not x.numel() or x.data_ptr() & 15 or x.stride(-1) != 1:
        return False
    return not any(stride * x.element_size() & 15 for stride in x.stride()[:-1])


def described(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor | None:
    """`x` as a kernel fetches blocks of it, zeros past its ends; None where the hardware could not."""
    if not _can_be_fetched(x):
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def described_rows(x: Tensor, block: tuple[int, int], swizzle: int) -> SharedDescriptor | None:
    """The same for Gluon, of the rows of contiguous `x`, swizzled within `swizzle` bytes; None also where strided."""
    if not x.is_contiguous() and x.dim() != 2:
        return None
    rows = x.reshape(-1, x.shape[-1])
    if not _can_be_fetched(rows):
        return None
    layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * x.element_size(), rank=2)
    return SharedDescriptor(rows, list(rows.shape), list(rows.stride()), list(block), layout)


def stored(x: Tensor) -> Tensor:
    """`x` as kernels take it: bfloat16 as int16 and codes as uint8, the same bits."""
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16)
    return x.view(torch.uint8) if x.element_size() == 1 else x


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` [M, K] or [G, N, K] as rows of adjacent elements at one stride, and that stride; a copy where it is not."""
    if x.is_contiguous():
        return x, x.shape[-1]
    stride = x.stride(-2)
    together = x.dim() == 2 or x.stride(0) == stride * x.shape[1]
    if x.stride(-1) != 1 or stride < x.shape[-1] or not together:
        return x.contiguous(), x.shape[-1]
    return x, stride
