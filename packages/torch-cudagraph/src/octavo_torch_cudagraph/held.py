"""Held: the tensors that a graph knows by address, which a replay checks are still in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from octavo_torch.plugin_api import ZeroGradient
from octavo_torch_cudagraph.restoring import main_grad_of

Named = Iterable[tuple[str, Any]]


class Held:
    """Tensors that a graph reads or writes by address, and values that it took over from Python, by name.

    values   asked at the capture and at each replay: tensors are compared by address, others by equality
    """

    def __init__(self, values: Callable[[], Named] = tuple) -> None:
        self._values = values
        self._captured = self._now()

    def check(self) -> None:
        """ValueError for a tensor that has come, gone or moved since the capture, or a value that has changed."""
        now = self._now()
        if now == self._captured:
            return
        for name in {**self._captured, **now}:
            before, after = self._captured.get(name), now.get(name)
            if before == after:
                continue
            if isinstance(before, _Address) or isinstance(after, _Address):
                what = "gone" if after is None else "new" if before is None else "another tensor"
                raise ValueError(
                    f"{name} is {what} since the capture, and the graph knows what it was captured with alone; write "
                    "into that tensor in place, or capture again"
                )
            raise ValueError(
                f"{name} is {after!r} and the graph was captured with {before!r}, which it keeps; capture again, or "
                "make it a tensor on the GPU before the capture"
            )

    def _now(self) -> dict[str, Any]:
        return {name: _address(value) if isinstance(value, Tensor) else value for name, value in self._values()}


class _Address(int):
    """Where a tensor begins."""


def _address(value: Tensor) -> _Address:
    # data_ptr() would allocate memory for zeros that have none
    return _Address(id(value) if isinstance(value, ZeroGradient) else value.data_ptr())


def held_by(module: nn.Module, *, grads: bool = False) -> Named:
    """Parameters, buffers and main_grad of `module`, with `grads` the parameters' .grad, too."""
    for name, parameter in module.named_parameters():
        yield name, parameter
        main_grad = main_grad_of(parameter)
        if main_grad is not None:
            yield f"{name}.main_grad", main_grad
        if grads and parameter.grad is not None:
            yield f"{name}.grad", parameter.grad
    yield from module.named_buffers()
