"""Gradients of weights that are codes: how they move to the masters, which an optimizer steps."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef


class NotedGradients:
    """The gradients that masters had at a moment, by the masters' names, as long as nothing has changed them since."""

    def __init__(self) -> None:
        self._gradients: dict[str, tuple[TensorWeakRef, int]] = {}

    def note(self, masters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """The moment is now; gradients of an earlier one are forgotten."""
        present = ((key, master.grad) for key, master in masters)
        self._gradients = {key: (TensorWeakRef(grad), grad._version) for key, grad in present if grad is not None}

    def has(self, key: str, grad: Tensor) -> bool:
        """Whether `grad`, of the master that is called `key`, is what it was then."""
        noted, version = self._gradients.get(key, (None, 0))
        return noted is not None and noted() is grad and grad._version == version


def check_not_taken(taken: NotedGradients, key: str, name: str, grad: Tensor) -> None:
    """ValueError where `grad`, to which a new gradient is to be added, was taken and has not been cleared since.

    taken  the gradients that the optimizer's last step has taken
    key    the master's name
    name   the weight's, for the message
    """
    if taken.has(key, grad):
        raise ValueError(
            f"the master of {name} has the gradient that the optimizer's last step took, and a new one would be "
            "added to it; call optimizer.zero_grad() after each step: the module's zero_grad() does not reach the "
            "masters"
        )


def gradient_buffer(master: nn.Parameter) -> Tensor:
    """The master's gradient, zeros where it has none: the buffer to which a layer with `main_grad` adds."""
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad


def has_uncollected(weight: Tensor) -> bool:
    """Whether the weight has a gradient that its master lacks: not one that a layer has added to the master's."""
    return weight.grad is not None and not getattr(weight, "grad_added_to_main_grad", False)


def take_gradient(weight: Tensor) -> Tensor | None:
    """The gradient that the weight's master lacks, if there is one; the weight then has none."""
    grad = weight.grad if has_uncollected(weight) else None
    clear_gradient(weight)
    return grad


def clear_gradient(weight: Tensor) -> None:
    """Leave the weight without a gradient, of its own and in the master's buffer."""
    weight.grad = None
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def a_scaler_steps() -> bool:
    """Whether an enabled GradScaler has called this: torch tells the hooks of an optimizer nothing about it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False
