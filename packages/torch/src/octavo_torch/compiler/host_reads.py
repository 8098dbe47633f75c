"""watch_host_reads: lists the operations that bring values of a tensor to the host while a block runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
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
_READING_METHODS: Mapping[object, str] = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.item: "item",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.cpu: "cpu",
    torch.Tensor.__bool__: "__bool__",
    torch.Tensor.__int__: "__int__",
    torch.Tensor.__float__: "__float__",
    torch.Tensor.__index__: "__index__",
    torch.Tensor.__array__: "__array__",
}


class _Methods(TorchFunctionMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = _READING_METHODS.get(func)
        if name is not None:
            self.reads.append(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


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
            # an operator hides what it does from the modes, which are off inside it
            with self, _Methods(self.reads):
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
