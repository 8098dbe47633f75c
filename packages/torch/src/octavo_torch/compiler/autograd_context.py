"""AutogradContext: the type of `ctx` in a torch.autograd.Function, of which torch's own class declares less."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

Packed = tuple[torch.dtype, torch.Size, torch.device]
"""Of a tensor, as it was saved."""


class AutogradContext(Protocol):
    """The part of a ctx that torch provides. A Function adds what its forward leaves for its backward.

    packed   see octavo_torch.autograd.saved_tensors; None where nothing is checked
    hooked   whether saved-tensor hooks were at work
    """

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    packed: tuple[Packed | None, ...] | None
    hooked: bool

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps tensors for backward, each watched for changes in place."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Says which results have no gradient."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Says which inputs forward has written."""
