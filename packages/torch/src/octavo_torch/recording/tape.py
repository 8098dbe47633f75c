"""Tape: what a pass allocates and launches, written down while it runs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from octavo_registry.contract.recording import MakeRecorder, Recorder

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    {
        _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)  # fmt: skip


class Allocation(NamedTuple):
    """Memory that a pass has allocated: its address and bytes."""

    start: int
    size: int


class _Thread(threading.local):
    writes = False


_thread = _Thread()


def is_writing() -> bool:
    """Whether this thread is writing down a pass: whatever runs meanwhile, as in a handler of another dispatch mode, is
    composed."""
    return _thread.writes


class Tape(TorchDispatchMode):
    """Writes down the pass that runs inside of a `with`; one at a time in a thread.

    recorder      has the launches, whose arrays are by number `given`, and behind them `allocations`
    allocations   what the pass has allocated. Some of it may have been freed and allocated again
    stops         names that `stop` was told, each with the number of launches before it
    """

    def __init__(self, make: MakeRecorder[Tensor], like: Tensor, given: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder: Recorder[Tensor] = make(like)
        self.allocations: list[Allocation] = []
        self.stops: list[tuple[str, int]] = []
        self._device = like.device
        self._refusal: str | None = None
        for tensor in given:
            if tensor is not None:
                self._name(tensor, Allocation(tensor.data_ptr(), tensor.nbytes), replaces=False)

    @property
    def refusal(self) -> str | None:
        """Why the pass cannot be run again; None where it can."""
        return self._refusal or self.recorder.refusal

    def __enter__(self) -> Tape:
        """From now on, launches and operations of this thread are written down."""
        self.recorder.__enter__()
        _thread.writes = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends that."""
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        _thread.writes = False
        self.recorder.__exit__(kind, error, trace)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Runs an operation of torch: what it allocates is named, views are of named arrays, and others compute."""
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            if result.numel():
                memory = result.untyped_storage()
                self.allocations.append(Allocation(memory.data_ptr(), memory.nbytes()))
                self._name(result, self.allocations[-1], replaces=True)
        elif not func.is_view:
            self._refusal = self._refusal or f"it calls {func}"
        return result

    def stop(self, name: str) -> None:
        """Notes that the pass has something to do between its launches, which is called `name`."""
        self.stops.append((name, len(self.recorder.arrays())))

    def _name(self, tensor: Tensor, memory: Allocation, *, replaces: bool) -> None:
        if tensor.device != self._device:
            self._refusal = self._refusal or f"it reads or writes an array on {tensor.device}"
            return
        try:
            self.recorder.name(*memory, replaces)
        except ValueError as error:
            self._refusal = self._refusal or str(error)
