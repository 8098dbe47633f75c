"""Arguments of a captured function: tensors, which a replay copies into the graph's own, and constants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo_torch.plugin_api import dtype_text


def on_host(tensor: Tensor) -> bool:
    """True for a tensor that a graph cannot read."""
    return not tensor.is_cuda


class Arguments:
    """The arguments of one capture, flattened: tensors of the graph's own, and constants.

    tensors     the graph's inputs, in the order in which replays find them
    device      the one CUDA device that they are all on
    names       of all leaves, such as "argument 1['sizes']"
    """

    def __init__(self, examples: Sequence[Any]) -> None:
        leaves, self._tree = pytree.tree_flatten(tuple(examples))
        names = list(_names(examples))
        for name, leaf in zip(names, leaves, strict=True):
            _check_example(name, leaf)
        given = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)]
        if not given:
            raise ValueError(
                "there is no tensor among the arguments; give examples of what changes between replays, group sizes "
                "as a tensor among them"
            )
        first, tensor = given[0]
        self.device: torch.device = tensor.device
        for name, tensor in given:
            if tensor.device != self.device:
                raise ValueError(f"{name} is on {tensor.device} and {first} on {self.device}; move one of them")
        self.names = names
        self._leaves = [_own(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.tensors: tuple[Tensor, ...] = tuple(leaf for leaf in self._leaves if isinstance(leaf, Tensor))

    @property
    def values(self) -> tuple[Any, ...]:
        """The arguments as the function takes them."""
        values: tuple[Any, ...] = pytree.tree_unflatten(self._leaves, self._tree)
        return values

    def check(self, arguments: Sequence[Any]) -> list[Any]:
        """The leaves of `arguments`; ValueError for what is not as the examples were. Strides may be any."""
        leaves, tree = pytree.tree_flatten(tuple(arguments))
        if tree != self._tree:
            raise ValueError(
                f"the arguments are {_shape_of(tree)} and those of the capture were {_shape_of(self._tree)}; give as "
                "many, in the same containers, or capture another graph"
            )
        for name, own, new in zip(self.names, self._leaves, leaves, strict=True):
            _check_same(name, own, new)
        return leaves

    @torch.no_grad()
    def copy_in(self, arguments: Sequence[Any]) -> None:
        """Write `arguments` into the graph's tensors, after `check`."""
        for own, new in zip(self._leaves, self.check(arguments), strict=True):
            if isinstance(own, Tensor) and own is not new:
                own.copy_(new, non_blocking=True)


def _shape_of(tree: pytree.TreeSpec) -> str:
    return str(pytree.tree_unflatten(["*"] * tree.num_leaves, tree)).replace("'*'", "*")


def _names(examples: Sequence[Any]) -> Iterator[str]:
    for number, example in enumerate(examples):
        for path, _ in pytree.tree_flatten_with_path(example)[0]:
            yield f"argument {number}{pytree.keystr(path)}"


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _check_example(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if on_host(value):
            raise ValueError(
                f"{name} is {dtype_text(value.dtype)} {list(value.shape)} on {value.device}, whose values a CUDA graph "
                "would keep; move it to the GPU, group sizes, too"
            )
        return
    if "[" in name and isinstance(value, int) and not isinstance(value, bool):
        raise ValueError(
            f"{name} is the integer {value}, which a CUDA graph would keep; give sizes as a tensor on the GPU, which "
            "each replay reads anew"
        )
    if hasattr(value, "__array__"):
        raise ValueError(
            f"{name} is a {type(value).__name__}, whose values a CUDA graph would keep; give a tensor on the GPU"
        )


def _check_same(name: str, own: Any, new: Any) -> None:
    if not isinstance(own, Tensor):
        if type(own) is not type(new) or own != new:
            raise ValueError(f"{name} is {new!r} and the graph was captured with {own!r}; capture another graph for it")
        return
    if not isinstance(new, Tensor):
        raise ValueError(f"{name} is of type {type(new).__name__}; give {dtype_text(own.dtype)} {list(own.shape)}")
    if new.shape != own.shape or new.dtype is not own.dtype or new.device != own.device:
        raise ValueError(
            f"{name} is {dtype_text(new.dtype)} {list(new.shape)} on {new.device} and the graph was captured with "
            f"{dtype_text(own.dtype)} {list(own.shape)} on {own.device}; give such a tensor, in any strides, or "
            "capture another graph"
        )
