"""restored: puts back the values that warm-up runs change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from octavo_torch.plugin_api import ZeroGradient


@contextmanager
def restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give `tensors` the values back that they had before the block; they stay the same tensors."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)


def state_of(module: nn.Module) -> list[Tensor]:
    """What a forward and backward of `module` may change in place: parameters, buffers, their .grad and main_grad."""
    found: list[Tensor] = [*module.parameters(), *module.buffers()]
    for parameter in module.parameters():
        found += [buffer for buffer in (parameter.grad, main_grad_of(parameter)) if buffer is not None]
    # zeros without memory are zeros before and after
    return [value for value in found if not isinstance(value, ZeroGradient) or value.is_written]


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """The buffer that a weight gradient goes to, if there is one."""
    get = getattr(parameter, "get_main_grad", None)
    buffer: Tensor | None = getattr(parameter, "main_grad", None) if get is None else get()
    return buffer
