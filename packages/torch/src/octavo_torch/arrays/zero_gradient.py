"""ZeroGradient: the zeros that stand for a gradient which went elsewhere, without memory until somebody writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default, _aten.view.default}
"""Operators that return the tensor itself where they keep its shape."""


class ZeroGradient(torch.Tensor):
    """Zeros of a shape, strides, dtype and device, which take no memory before they are written.

    autograd stores it as `.grad` without a copy, because it has the strides that a gradient of its weight has to have.
    Operators of torch that read it get one zero, expanded. The first that may write it, or that makes a view of it,
    gets a tensor of zeros in full size; that tensor is what it stands for from then on, and so are its aliases. Added
    to a gradient that is there already it costs nothing. Copies and pickles are ordinary tensors.
    """

    _memory: list[Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        memory: list[Tensor] | None = None,
    ) -> ZeroGradient:
        """memory: holds the tensor in full size once there is one; aliases share the list."""
        grad: ZeroGradient = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), strides=tuple(strides), dtype=dtype, device=device
        )
        grad._memory = [] if memory is None else memory
        return grad

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        """`func` on one expanded zero where it reads, on a tensor in full size where it may write or makes a view."""
        options = dict(kwargs or {})
        first, second = (*args, None, None)[:2]
        if func in _SAME and (func is not _aten.view.default or tuple(second) == tuple(first.shape)):
            return first._like(first._memory)
        if func is _aten.record_stream.default and not first._memory:
            return None
        if func is _aten.squeeze.dim and second == 0 and first.shape[0] == 1 and not first._memory:
            return first.parts()[0]
        if not options and isinstance(second, cls) and not second._memory and first.shape == second.shape:
            if func is _aten.add_.Tensor:
                return first
            if (
                func is _aten.add.Tensor
                and isinstance(first, cls)
                and not first._memory
                and first.dtype is second.dtype
            ):
                return first._like([])
        # operators of other libraries may write what their schema does not tell, and read strides
        foreign = func.namespace not in ("aten", "prims")
        writes = {part.name: foreign or part.alias_info is not None for part in func._schema.arguments}
        values = [_given(value, written) for value, written in zip(args, writes.values(), strict=False)]
        return func(*values, **{name: _given(value, writes[name]) for name, value in options.items()})

    @property
    def is_written(self) -> bool:
        """True once it has a tensor in full size."""
        return bool(self._memory)

    def fresh(self) -> ZeroGradient:
        """Other zeros like these, whatever has been written into these."""
        return self._like([])

    def parts(self) -> tuple[ZeroGradient, ...]:
        """Zeros like each matrix of these [G, ...], which is nobody else's and unwritten."""
        shape, strides = self.shape[1:], self.stride()[1:]
        return tuple(ZeroGradient(shape, strides, self.dtype, self.device) for _ in range(self.shape[0]))

    def _like(self, memory: list[Tensor]) -> ZeroGradient:
        return ZeroGradient(self.shape, self.stride(), self.dtype, self.device, memory)

    def _read(self) -> Tensor:
        """The values: one zero, expanded, or the tensor in full size."""
        if self._memory:
            return self._memory[0]
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)

    def _written(self) -> Tensor:
        """The tensor in full size."""
        if not self._memory:
            made = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
            self._memory.append(made.zero_())
        return self._memory[0]

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of one element, or of the tensor in full size."""
        return self._read().untyped_storage()

    def data_ptr(self) -> int:
        """The address of the tensor in full size, which whoever asks may write."""
        return self._written().data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """A view of the tensor in full size."""
        return self._written().numpy(force=force)

    def __dlpack__(self, **options: object) -> object:
        """A view of the tensor in full size, which whoever asks may write."""
        return self._written().__dlpack__(**options)  # type: ignore[arg-type]

    def tolist(self) -> Any:
        """The values."""
        return self._read().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = memo.setdefault(id(self), self._read().clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if self._memory:
            return repr(self._memory[0])
        return f"ZeroGradient(shape={list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"


def _given(value: object, written: bool) -> object:
    """An argument of an operator that takes plain tensors."""

    def plain(grad: ZeroGradient) -> Tensor:
        return grad._written() if written else grad._read()

    return pytree.tree_map_only(ZeroGradient, plain, value)


def zeros_for(leaves: Sequence[Tensor]) -> ZeroGradient:
    """The zeros that stand for the gradient of a weight [G, N, K], or of G tensors [N, K] as one [G, N, K]."""
    first = leaves[0]
    # the strides that autograd asks of a gradient: the tensor's own, where these leave no gap
    strides = torch.empty_like(first, device="meta").stride()
    if first.dim() == 3:
        return ZeroGradient(first.shape, strides, first.dtype, first.device)
    return ZeroGradient((len(leaves), *first.shape), (first.numel(), *strides), first.dtype, first.device)


def cast_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad` in `dtype`. A ZeroGradient that has not been written stays one; torch's own cast would allocate it."""
    if grad.dtype is dtype:
        return grad
    if isinstance(grad, ZeroGradient) and not grad.is_written:
        return ZeroGradient(grad.shape, grad.stride(), dtype, grad.device)
    return grad.to(dtype)


def parts_of(grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of G tensors out of their gradient as one tensor [G, ...]."""
    if isinstance(grad, ZeroGradient) and not grad.is_written:
        return grad.parts()
    return grad.unbind(0)
