"""AutogradContext: the type of `ctx` in a torch.autograd.Function, of which torch's own class declares less."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AutogradContext(Protocol):
    """The part of a ctx that torch provides. A Function adds what its forward leaves for its backward."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keeps tensors for backward, each watched for changes in place."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Says which results have no gradient."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Says which inputs forward has written."""
