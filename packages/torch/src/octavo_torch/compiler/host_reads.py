"""watch_host_reads: lists the operations that bring values of a tensor to the host while a block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo_torch.compiler.operators import IMPLEMENTATIONS

# operators whose result, or the shape of it, depends on values
_WAITING_OPERATORS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::is_nonzero",
        "aten::item",
        "aten::equal",
        "aten::nonzero",
        "aten::masked_select",
        "aten::_unique2",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::bincount",
    }
)

# methods that read a CPU tensor's memory without passing the dispatcher
_READING_METHODS = (
    *("tolist", "item", "numpy", "cpu"),
    *("__bool__", "__int__", "__float__", "__index__", "__array__"),
)


class _Methods:
    """The methods of torch.Tensor that read values, each of which notes its name while this is active.

    A TorchFunctionMode would not do: torch turns it off inside of backward and torch.autograd.grad.
    """

    def __init__(self, reads: list[str]) -> None:
        self.reads = reads
        self._patches = ExitStack()

    def __enter__(self) -> None:
        for name in _READING_METHODS:
            self._patches.enter_context(patch.object(torch.Tensor, name, self._noting(name)))

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _noting(self, name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        @wraps(method)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.reads.append(f"Tensor.{name}")
            return method(*args, **kwargs)

        return noting


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, reads: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = reads

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name: str = func._schema.name
        if name in _WAITING_OPERATORS:
            self.reads.append(name)
        elif name == "aten::_to_copy" and _leaves_device(args[0], (kwargs or {}).get("device")):
            self.reads.append(f"{name} to {(kwargs or {})['device']}")
        elif name == "aten::index" and any(index is not None and index.dtype is torch.bool for index in args[1]):
            self.reads.append(f"{name} by a mask")
        implementation = IMPLEMENTATIONS.get(name)
        if implementation is not None:
            with self:  # an operator hides what it does from the mode, which is off inside it
                return implementation(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _leaves_device(source: torch.Tensor, device: torch.device | str | None) -> bool:
    return device is not None and torch.device(device).type == "cpu" and not source.is_cpu


@contextmanager
def watch_host_reads() -> Iterator[list[str]]:
    """A list that fills with the names of waiting operations while the block runs, backward passes included."""
    reads: list[str] = []
    with _Operators(reads), _Methods(reads):
        yield reads
