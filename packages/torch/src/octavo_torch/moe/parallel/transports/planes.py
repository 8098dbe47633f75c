"""Rows of any dtype as integers, which every device picks and copies: not each of them indexes 8-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def as_words(plane: Tensor) -> Tensor:
    """The rows of `plane` [n, w] as integers of the most bytes that divide them; contiguous."""
    # torch calls no row and one row contiguous whatever their strides and their offset are, and then views neither
    if not plane.numel() or plane.stride() != (plane.shape[1], 1):
        plane = plane.clone(memory_format=torch.contiguous_format)
    row_bytes = plane.shape[1] * plane.itemsize
    word = next(word for word in _WORDS if row_bytes % word.itemsize == 0)
    # a row of another number of bytes is read byte by byte
    return plane.view(torch.uint8).view(word) if plane.data_ptr() % word.itemsize == 0 else plane.view(torch.uint8)


def row_bytes(plane: Tensor) -> int:
    """Of each row of `plane` [n, w]."""
    return int(plane.shape[1]) * plane.itemsize
