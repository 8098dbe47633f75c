"""Calls octavo_native with tensors: their addresses and row strides, the current stream, a workspace."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from octavo_native import Sequence
from octavo_torch.plugin_api import dtype_text, row_strides

PIECE = 16
"""Bytes that a kernel loads or stores at once. Rows that do not start at a multiple of it are read slowly or copied."""

_WORKSPACE_ALIGNMENT = 256

# An array without elements has no memory, and address 0 means "not given" to octavo_native. Nothing is read here.
_NOWHERE = 256

_threads = torch.get_num_threads


def address(tensor: Tensor | None) -> int:
    """The tensor's first byte; 0 for None. Raises ValueError for a tensor whose memory was freed."""
    return 0 if tensor is None else tensor.data_ptr() or _without_memory(tensor)


def _without_memory(tensor: Tensor) -> int:
    if tensor.numel():
        raise ValueError(
            f"a tensor {list(tensor.shape)} in {dtype_text(tensor.dtype)} on {tensor.device} has no memory; its "
            "storage was freed, as FSDP frees gathered parameters: take it from its module again, inside of forward"
        )
    return _NOWHERE


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """`x` [M, K] or [G, N, K] as rows of K elements side by side, and the row stride in elements.

    It is x itself if x is contiguous, or if its rows start at one stride and each at a multiple of 16 bytes; otherwise,
    as for a transposed or expanded view, a contiguous copy.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    stride: int = x.stride(-2)
    if (
        x.stride(-1) != 1
        or stride < x.shape[-1]
        or (x.dim() == 3 and x.stride(0) != stride * x.shape[1])
        or (stride * x.element_size()) % PIECE
        or x.data_ptr() % PIECE
    ):
        return x.contiguous(), x.shape[-1]
    return x, stride


def aligned_rows(x: Tensor) -> tuple[Tensor, int]:
    """`as_rows` for kernels that read 16-byte pieces alone: contiguous rows on a GPU, too, start at a multiple."""
    rows, stride = as_rows(x)
    if rows.is_cuda and rows.data_ptr() % PIECE:
        return rows.clone(), stride
    return rows, stride


def in_pieces(x: Tensor) -> Tensor:
    """`x`, or a copy, that is contiguous and starts at a multiple of 16 bytes, as kernels that read pieces need."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % PIECE else x


def writable_strides(out: Tensor) -> tuple[int, int] | None:
    """`row_strides` of `out`; None also where its rows, on a GPU, do not start at multiples of 16 bytes."""
    strides = row_strides(out)
    if strides is not None and out.is_cuda:
        size = out.element_size()
        if out.data_ptr() % PIECE or any(stride * size % PIECE for stride in strides):
            return None
    return strides


def workspace(size: int, like: Tensor) -> tuple[Tensor | None, int]:
    """`size` bytes on `like`'s device and current stream, and their aligned address; (None, 0) for none.

    It comes from torch's allocator in each call, so that calls on other streams and threads have other memory.
    """
    if not size:
        return None, 0
    # the CPU's allocator aligns to less than kernels ask for
    spare = 0 if like.is_cuda else _WORKSPACE_ALIGNMENT
    memory = torch.empty(size + spare, dtype=torch.uint8, device=like.device)
    return memory, -(-memory.data_ptr() // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT


class Listener(Protocol):
    """Is told of launches."""

    def add(self, call: Callable[..., None], like: Tensor, arguments: Mapping[str, object], recordable: bool) -> None:
        """A launch that is about to be made: `submit`'s arguments."""


class _Listening(threading.local):
    listener: Listener | None = None


listening = _Listening()
"""Of each thread, who is told of its launches."""


def submit(
    call: Callable[..., None],
    like: Tensor,
    arguments: Mapping[str, object],
    *,
    threaded: bool = True,
    recordable: bool = True,
) -> None:
    """Run `call` on `like`'s device: on the current stream of a GPU, on torch's number of threads on a CPU.

    recordable   whether the call takes `into`, a Sequence that it appends itself to
    """
    if listening.listener is not None:
        listening.listener.add(call, like, arguments, recordable)
    if not like.is_cuda:
        if threaded:
            call(cuda=False, threads=_threads(), **arguments)
        else:
            call(cuda=False, **arguments)
        return
    device = like.device
    # torch.cuda's own functions create objects and check that CUDA is initialized, which costs as much as a launch
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if torch._C._cuda_getDevice() == device.index:
        call(cuda=True, stream=stream, **arguments)
        return
    with torch.cuda.device(device):
        call(cuda=True, stream=stream, **arguments)


def run(sequence: Sequence, arrays: list[int], like: Tensor, *part: int) -> None:
    """Run recorded launches on `like`'s device, as `submit` does with one call.

    part   the number of the first launch, and that of the one at which it ends; none: all of them
    """
    if listening.listener is not None:
        listening.listener.add(sequence.run, like, {}, False)
    if not like.is_cuda:
        sequence.run(arrays, 0, _threads(), *part)
        return
    device = like.device
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if torch._C._cuda_getDevice() == device.index:
        sequence.run(arrays, stream, 1, *part)
        return
    with torch.cuda.device(device):
        sequence.run(arrays, stream, 1, *part)
