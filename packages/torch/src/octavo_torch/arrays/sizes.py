"""Group sizes as backends take them: an integer tensor, checked where its values can be read without a sync."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Protocol, SupportsIndex, runtime_checkable

import torch
from torch import Tensor

from octavo import check_group_sizes
from octavo_registry.contract.arrays import Prepared
from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.dtypes import name_of
from octavo_torch.arrays.operands import check_layout, check_not_nested
from octavo_torch.compiler.tracing import is_plain

_INT64, _STRIDED = torch.int64, torch.strided


class HostDType(Protocol):
    """The type of an array's elements, as numpy describes it."""

    @property
    def kind(self) -> str:
        """One letter: "i" and "u" are integers."""


@runtime_checkable
class HostArray(Protocol):
    """An array in host memory, such as numpy's."""

    @property
    def dtype(self) -> HostDType:
        """The type of its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its lengths."""

    def tolist(self) -> object:
        """The elements, as a list where there is one axis."""


GroupSizes = Tensor | Sequence[int] | HostArray
"""What callers give as the sizes of G groups."""


Sizes = Tensor | Prepared[Tensor]
"""What operations on rows take as group sizes: int [G], or what their backend prepared."""


def group_sizes_of(sizes: Sizes) -> Tensor:
    """The sizes [G] themselves."""
    return sizes if isinstance(sizes, Tensor) else sizes.group_sizes


def as_sizes(group_sizes: object, rows: int, groups: int | None, like: Tensor) -> tuple[Tensor, bool]:
    """`group_sizes` as an int64 CPU tensor and True, or as the caller's own tensor on `like`'s device and False.

    Host sizes (a sequence of integers, a numpy array, a CPU tensor) are checked: ValueError for a negative size or a
    sum past `rows`. Unless `groups` is None, their number must equal it. Under torch.compile the values are checked
    inside the operators, where they are known.
    """
    # exactly a Tensor: those that a compiler traces are of a subclass
    if (
        type(group_sizes) is Tensor
        and group_sizes.is_cpu
        and group_sizes.dtype is _INT64
        and group_sizes.layout is _STRIDED
    ):
        host = group_sizes.tolist()
        # a list of as many integers as groups: then the tensor has one axis
        if type(host) is list and len(host) == groups and type(host[0]) is int and sum(host) <= rows:
            for size in host:
                if size < 0:
                    break
            else:
                return group_sizes, True
    sizes, at_host = _checked_sizes(group_sizes, rows, like)
    if groups is not None and sizes.shape[0] != groups:
        raise ValueError(f"group_sizes has {sizes.shape[0]} sizes and weight {groups} groups; give one size per group")
    return sizes, at_host


def all_rows(x: Tensor) -> Tensor:
    """The sizes [1] of one group with all rows of `x` [..., K], on its device.

    A captured graph takes no sizes from the host, and one tensor for many calls could belong to a graph's memory.
    """
    check_not_nested("x", x)
    return torch.full((1,), prod(x.shape[:-1]), dtype=torch.int64, device=x.device)


def _checked_sizes(group_sizes: object, rows: int, like: Tensor) -> tuple[Tensor, bool]:
    if not isinstance(group_sizes, Tensor):
        host = _host_list(group_sizes)
        _check_host(host, rows)
        # a default device says where new data live; these are read on the host
        return torch.tensor(host, dtype=torch.int64, device="cpu"), True
    if group_sizes.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"group_sizes has dtype {name_of(group_sizes.dtype)}; give int32 or int64")
    if group_sizes.dim() != 1:
        raise ValueError(f"group_sizes has shape {list(group_sizes.shape)}; give one size per group, [G]")
    check_layout("group_sizes", group_sizes)
    if not group_sizes.is_cpu:
        if group_sizes.device != like.device:
            where = "the CPU" if like.is_cpu else f"{like.device}, or to the CPU"
            raise ValueError(
                f"group_sizes is on {group_sizes.device} and x on {like.device}; move group_sizes to {where}"
            )
        return group_sizes, False
    sizes = group_sizes.to(torch.int64)
    if is_plain(group_sizes):
        _check_host(sizes.tolist(), rows)
    return sizes, True


def _check_host(sizes: list[int], rows: int) -> None:
    """Raises ValueError unless `sizes` has a group, no negative size and a sum of at most `rows`."""
    if not sizes:
        raise ValueError("group_sizes is empty; give one size per group, at least one")
    check_group_sizes(sizes, rows)


def _host_list(group_sizes: object) -> list[int]:
    if not isinstance(group_sizes, Sequence) and isinstance(group_sizes, HostArray):
        if len(group_sizes.shape) != 1 or group_sizes.dtype.kind not in "iu":
            raise ValueError(
                f"group_sizes is an array of {group_sizes.dtype} with shape {list(group_sizes.shape)}; "
                "give integers, [G]"
            )
        group_sizes = group_sizes.tolist()
    if group_sizes is None:
        raise ValueError("group_sizes is None, which is for an x that is quantized; give one size per group")
    if not isinstance(group_sizes, Sequence) or isinstance(group_sizes, str):
        raise ValueError(
            f"group_sizes is a {type(group_sizes).__name__}; "
            "give a list of integers, a numpy array or an integer tensor"
        )
    return [_integer(index, size) for index, size in enumerate(group_sizes)]


def _integer(index: int, size: object) -> int:
    """One size, an int or numpy's; not a tensor, whose value may be on a device."""
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    if not isinstance(size, bool | Tensor) and isinstance(size, SupportsIndex):
        with suppress(TypeError):  # of an array with axes
            return operator.index(size)
    raise ValueError(f"group_sizes[{index}] is {brief(size)}; sizes are integers")
