"""Weight gradients straight into a buffer that the weight carries, as Megatron's distributed optimizer keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from octavo_torch.dtypes import DTYPE_NAMES, name_of
from octavo_torch.strides import row_strides
from octavo_torch.tracing import is_plain

MainGrad = Literal["accumulate", "overwrite"]

_PIECE = 16
"""Bytes of the pieces in which kernels of a CUDA device write: a row starts on a whole one."""


def check_mode(mode: Any) -> None:
    """ValueError for anything but the two modes."""
    if isinstance(mode, Tensor):
        raise ValueError(
            "main_grad is a Tensor; set it as weight.main_grad, and give 'accumulate' or 'overwrite' as main_grad here"
        )
    if not isinstance(mode, str) or mode not in ("accumulate", "overwrite"):
        given = repr(mode) if isinstance(mode, str | int | float) else f"a {type(mode).__name__}"
        raise ValueError(f"main_grad is {given}; give 'accumulate', 'overwrite' or None")


def check_main_grad(weight: Tensor) -> None:
    """What can be known of `weight` and its buffer in forward: `get_main_grad` is asked in backward alone."""
    if not weight.is_leaf:
        raise ValueError(
            "main_grad was given and weight is the result of an operation, whose own gradient would be lost; "
            "give the parameter itself, or leave main_grad out"
        )
    if getattr(weight, "get_main_grad", None) is None:
        _check_buffer("weight.main_grad", getattr(weight, "main_grad", None), weight)


def write_main_grad(wgrad: Callable[..., Any], x: Any, dy: Any, sizes: Any, weight: Tensor, mode: MainGrad) -> Tensor:
    """Run `wgrad` into the weight's buffer; returns the zeros that stand for the gradient, of one element's memory."""
    if torch.compiler.is_compiling():
        raise ValueError(
            "main_grad was given and this backward is being traced, where the buffer's writes would be lost; "
            "run backward without compiled autograd, or leave main_grad out"
        )
    get = getattr(weight, "get_main_grad", None)
    if get is None:
        name, buffer = "weight.main_grad", getattr(weight, "main_grad", None)
    else:
        name, buffer = "weight.get_main_grad()", get()
    _check_buffer(name, buffer, weight)
    accumulate = mode == "accumulate" and not getattr(weight, "overwrite_main_grad", False)
    wgrad(x, dy, sizes, out=buffer, accumulate=accumulate)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return weight.new_zeros(()).expand(weight.shape)


def _check_buffer(name: str, buffer: Any, weight: Tensor) -> None:
    shape, device = tuple(weight.shape), weight.device
    if buffer is None:
        raise ValueError(
            f"main_grad was given and {name} is None or absent; set it to a float32 tensor {list(shape)} on {device}, "
            "or leave main_grad out"
        )
    if not isinstance(buffer, Tensor) or not is_plain(buffer) or buffer.layout is not torch.strided:
        kind = f"{buffer.layout} tensor" if isinstance(buffer, Tensor) and is_plain(buffer) else type(buffer).__name__
        raise ValueError(f"{name} is a {kind}; give a plain strided tensor {list(shape)}, of a wrapper the local one")
    if tuple(buffer.shape) != shape or buffer.dtype not in DTYPE_NAMES or buffer.device != device:
        raise ValueError(
            f"{name} is {name_of(buffer.dtype)} {list(buffer.shape)} on {buffer.device}; "
            f"give float32, bfloat16 or float16 {list(shape)} on {device}"
        )
    if buffer.requires_grad:
        raise ValueError(f"{name} requires a gradient; give a plain buffer that backward may write")
    if row_strides(buffer) is None:
        raise ValueError(
            f"{name} has shape {list(shape)} and strides {list(buffer.stride())}, which cannot be written in place; "
            "give a buffer whose last stride is 1 and whose rows and groups follow one another without overlap"
        )
    if buffer.is_cuda:
        check_pieces(name, buffer)


def check_pieces(name: str, buffer: Tensor) -> None:
    """ValueError for a buffer on a GPU whose rows start between whole pieces."""
    size = buffer.element_size()
    if buffer.shape[2] * size % _PIECE:
        return  # no backend that writes in pieces serves such rows
    steps = [buffer.stride(d) * size for d in (0, 1) if buffer.shape[d] > 1]
    if buffer.data_ptr() % _PIECE or any(step % _PIECE for step in steps):
        raise ValueError(
            f"{name} starts at {buffer.data_ptr():#x} and its groups and rows are {steps} bytes apart; "
            f"give a buffer whose address and strides are multiples of {_PIECE} bytes"
        )
