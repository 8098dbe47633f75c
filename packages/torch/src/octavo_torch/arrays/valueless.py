"""Valueless: a tensor that has a shape and a dtype and, in the place of values, other tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NoReturn, Self

import torch
from torch import Tensor

from octavo_torch.arrays.checks import brief


class Valueless(torch.Tensor):
    """What of torch's tensor reaches for memory without an operator, which `__torch_dispatch__` would refuse.

    torch reads and shares the memory of such a tensor at no address, and takes values in `data` for its shape and dtype
    alone. `__tensor_flatten__` says under which names its tensors are.
    """

    _facts: ClassVar[tuple[str, ...]]
    """The attributes beside these tensors."""

    def _without_values(self, what: str) -> ValueError:
        """The error of what would need values, such as "add was called on"."""
        raise NotImplementedError

    def _own_names(self) -> list[str]:
        names: list[str] = self.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        return names

    def marks(self) -> dict[str, object]:
        """The attributes that others have set, such as `main_grad`."""
        own = {*self._own_names(), *self._facts}
        return {name: value for name, value in vars(self).items() if name not in own}

    def mark_again(self, marks: Mapping[str, object]) -> None:
        """Called when torch has swapped this tensor with another one: sets the attributes `marks` that it had, and
        registers its hooks, which torch still has in its dictionaries and no longer runs."""
        vars(self).update(marks)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(self, name):
                setattr(self, name, getattr(self, name))

    @property
    def data(self) -> Tensor:
        """Another one over the same tensors, as of every tensor; set to one of its class, this one has its tensors.

        Raises ValueError where it is set to values.
        """
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, type(self)):
            raise self._without_values(f"data was set to {brief(value)} on")
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        for name in (*value._own_names(), *self._facts):
            setattr(self, name, getattr(value, name))

    def share_memory_(self) -> Self:
        """Moves its tensors to memory that processes share."""
        for name in self._own_names():
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all of them are there."""
        return all(getattr(self, name).is_shared() for name in self._own_names())

    def storage(self) -> NoReturn:
        """Raises ValueError: writers of files ask for it where they have found no memory, and would say no more."""
        error = self._without_values("storage(), as of save_pretrained and of safetensors, was called on")
        raise ValueError(f"{error}; torch.save stores it in the state_dict of its module")

    def __dlpack__(self, **_: object) -> NoReturn:
        """Raises ValueError: there are no values."""
        raise self._without_values("__dlpack__ was called on")
