"""What writes down the operations of a call to run them later, and sees none of a kernel's: refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

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
    recorder = "torch.jit.trace" if is_jit_tracing() else "make_fx" if _makes_proxies() else ""
    # of codes it is their planes that a compiler traces
    if recorder and all(is_plain(part) for part in pytree.tree_leaves(x) if isinstance(part, Tensor)):
        raise NotImplementedError(
            f"{recorder} records a call of Octavo, whose kernels it cannot see, and its program would return what "
            "happened to be in memory; use torch.export.export, or torch.compile, which record the call as operators"
        )


def _makes_proxies() -> bool:
    # torch.func.linearize makes them of a call with a tangent, which is refused for that
    of_derivative = forward_ad._current_level >= 0
    return dispatch_modes() > 0 and not of_derivative and torch._C._get_dispatch_mode(_PROXY) is not None
