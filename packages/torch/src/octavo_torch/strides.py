"""How the rows of a tensor stand in memory."""

from __future__ import annotations

from torch import Tensor


def row_strides(x: Tensor) -> tuple[int, int] | None:
    """Elements between the rows of `x` and, for [G, N, K], between its matrices, where it can be written row by row.

    None where the elements of a row stand apart, or rows or matrices overlap or interleave.
    """
    rows, columns = x.shape[-2:]
    if x.is_contiguous():
        return columns, columns * rows
    row = columns if rows == 1 else x.stride(-2)
    inner = row * rows
    group = inner if x.dim() == 2 or x.shape[0] == 1 else x.stride(0)
    if (columns > 1 and x.stride(-1) != 1) or row < columns or group < inner:
        return None
    return row, group
