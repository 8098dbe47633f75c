"""How the rows of a tensor are laid out in memory."""

from __future__ import annotations

from torch import Tensor

from octavo_torch.compiler.tracing import is_plain


def row_strides(x: Tensor) -> tuple[int, int] | None:
    """Elements between the rows of `x` and, for [G, N, K], between its matrices, where it can be written row by row.

    None where the elements of a row are not adjacent, or rows or matrices overlap or interleave.
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


def overlaps_itself(x: Tensor) -> bool:
    """True unless every element of `x` provably has its own memory."""
    reach = 1
    for stride, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length > 1:
            if stride < reach:
                return True
            reach += stride * (length - 1)
    return False


def share_memory(a: Tensor, b: Tensor) -> bool:
    """True where an element of `a` may be an element of `b`; disjoint columns of one matrix share no element."""
    if not (is_plain(a) and is_plain(b)) or not a.numel() or not b.numel():
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (first, end), (start, last) = _extent(a), _extent(b)
    if end <= start or last <= first:
        return False
    if a.dim() != 2 or b.dim() != 2 or a.dtype is not b.dtype or a.stride() != b.stride() or a.stride(1) != 1:
        return True
    row = a.stride(0)
    distance = (b.storage_offset() - a.storage_offset()) % row
    return distance < a.shape[1] or distance + b.shape[1] > row


def _extent(x: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the one after the last."""
    reach = 1 + sum(stride * (length - 1) for stride, length in zip(x.stride(), x.shape, strict=True))
    return x.data_ptr(), x.data_ptr() + reach * x.element_size()
