"""How long modules take in a training step, forward and backward, by marks on the device's stream."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Mark:
    """A point in time: of the stream on a GPU, else of the host."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.event = torch.cuda.Event(enable_timing=True) if on_gpu else None  # type: ignore[no-untyped-call]
        self.time = 0.0

    def set(self) -> None:
        """The time is now."""
        if self.event is None:
            self.time = time.perf_counter()
        else:
            self.event.record()

    def until(self, later: Mark) -> float:
        """Milliseconds; waits for the later mark."""
        if self.event is None or later.event is None:
            return (later.time - self.time) * 1e3
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event))


class _InBackward(torch.autograd.Function):
    """The identity, which sets a mark when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Mark) -> Tensor:
        ctx.mark = mark
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.mark.set()
        return dy, None


class Spans:
    """The time that passes between the first argument of modules and their results, and between the gradients."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Mark, Mark]] = []
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def take(self) -> float:
        """Milliseconds of all spans since the last call; none is counted twice."""
        total = sum(start.until(end) for start, end in self._spans)
        self._spans.clear()
        return total

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        start, backward_end = Mark(self._device), Mark(self._device)
        start.set()
        self._open = start, backward_end
        return (_InBackward.apply(arguments[0], backward_end), *arguments[1:])  # type: ignore[no-untyped-call]

    def _leave(self, module: nn.Module, arguments: tuple[Any, ...], y: Tensor) -> Tensor:
        start, backward_end = self._open
        end, backward_start = Mark(self._device), Mark(self._device)
        end.set()
        self._spans += [(start, end), (backward_start, backward_end)]
        marked: Tensor = _InBackward.apply(y, backward_start)  # type: ignore[no-untyped-call]
        return marked
