"""Tensors as every pickle takes them: torch pickles FP8 ones in `torch.save` and between processes alone."""

from __future__ import annotations

import torch
from torch import Tensor

Pickled = Tensor | tuple[Tensor, torch.dtype]
"""A tensor, or the bytes of an FP8 one and its dtype."""


def pickled(tensor: Tensor) -> Pickled:
    """What to pickle in the place of `tensor`; it shares the memory."""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return tensor.view(torch.uint8), tensor.dtype
    return tensor


def unpickled(value: Pickled) -> Tensor:
    """The inverse of `pickled`."""
    if isinstance(value, Tensor):
        return value
    values, dtype = value
    return values.view(dtype)
