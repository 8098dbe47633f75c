"""What writes down the operations of a call to run them later, and sees none of a kernel's: refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo_torch.compiler.tracing import is_plain

_PROXY = torch._C._TorchDispatchModeKey.PROXY

is_jit_tracing: Callable[[], bool] = torch._C._is_tracing
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes see operations; make_fx's is one."""


def check_not_recorded(x: object) -> None:
    """Raises NotImplementedError inside of torch.jit.trace, and of make_fx on tensors with values.

    A call on ordinary tensors gives its kernels addresses: the program would have a result that nothing writes. What a
    compiler traces are no ordinary tensors, and become operators.
    """
    if isinstance(x, Tensor) and not is_plain(x):
        return
    if is_jit_tracing():
        raise _refusal("torch.jit.trace")
    if dispatch_modes() and torch._C._get_dispatch_mode(_PROXY) is not None:
        raise _refusal("make_fx")


def _refusal(recorder: str) -> NotImplementedError:
    return NotImplementedError(
        f"{recorder} records a grouped layer, whose kernels it cannot see, and its program would return what happened "
        "to be in memory; use torch.export.export, or torch.compile, which record the layer as operators"
    )
