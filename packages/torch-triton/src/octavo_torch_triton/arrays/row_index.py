"""RowIndex: which rows each group has, as kernels read it; computed once for all operations on the same rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import check_group_sizes
from octavo_torch.plugin_api import Operators, check_not_captured, status_word
from octavo_torch_triton.arrays.launch import start
from octavo_triton.kernels.panels import index_rows as index_kernel
from octavo_triton.layouts import index_programs, panels_of, table_words

define = Operators("octavo_torch_triton").define
"""Defines an operator of this package's namespace; one object, which lives as long as the operators."""


@dataclass(eq=False, slots=True)
class RowIndex:
    """Group sizes as kernels read them; bound functions of this package take it in the place of `group_sizes`.

    table         int64, see kernels.panels, on the device of the rows
    group_sizes   int64 [G], none negative, summing to at most `rows`
    rows          M
    """

    table: Tensor
    group_sizes: Tensor
    rows: int

    @property
    def groups(self) -> int:
        """G."""
        return self.group_sizes.shape[0]


def _index(sizes: Tensor, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    groups, device = sizes.shape[0], like.device
    checked = sizes.is_cpu
    if checked:
        check_group_sizes(sizes.tolist(), rows)
        if not like.is_cpu:
            check_not_captured("group_sizes", like)
            sizes = sizes.to(device, non_blocking=True)
    sizes = sizes.contiguous()
    table, bounded = (torch.empty(shape, dtype=torch.int64, device=device) for shape in _shapes(rows, groups))
    status = None if checked else status_word(device)
    programs, padded, chunk = index_programs(rows, groups)
    arguments = (sizes, table, bounded, status, rows, groups, panels_of(rows, groups))
    start(index_kernel, (programs,), like, arguments, GROUPS=padded, CHUNK=chunk, FLAG=not checked)
    return table, bounded


def _shapes(rows: int, groups: int) -> tuple[tuple[int], tuple[int]]:
    return (table_words(rows, groups),), (groups,)


def _index_fake(sizes: Tensor, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    table, bounded = (like.new_empty(shape, dtype=torch.int64) for shape in _shapes(rows, sizes.shape[0]))
    return table, bounded


_index_of = define("index(Tensor sizes, SymInt rows, Tensor like) -> (Tensor, Tensor)", _index, _index_fake)


def index_rows(group_sizes: Tensor, rows: int, like: Tensor) -> RowIndex:
    """The index of integer `group_sizes` [G] for `rows` rows on `like`'s device.

    Sizes in host memory are checked and raise ValueError; others are cut to bounds and set the device's status word.
    """
    table, bounded = _index_of(group_sizes, rows, like)
    return RowIndex(table, bounded, rows)


def index_of(group_sizes: Tensor | RowIndex | None, rows: int, like: Tensor) -> RowIndex:
    """The index of ragged rows; sizes None: all rows are one group."""
    if isinstance(group_sizes, RowIndex):
        if group_sizes.rows != rows or group_sizes.table.device != like.device:
            raise ValueError(
                f"group_sizes is a RowIndex of {group_sizes.rows} rows on {group_sizes.table.device} and the operand "
                f"has {rows} rows on {like.device}; compute one for them"
            )
        return group_sizes
    if group_sizes is None:
        group_sizes = torch.full((1,), rows, dtype=torch.int64, device=like.device)
    return index_rows(group_sizes, rows, like)
