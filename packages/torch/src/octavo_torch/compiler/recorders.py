"""Refuses torch.jit.trace and make_fx, which record a call's operations and cannot see what a kernel writes."""

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
    """Raises NotImplementedError inside of torch.jit.trace, and inside of make_fx where `x` has ordinary tensors.

    A call on ordinary tensors passes their addresses to its kernels, so the recorded program would have a result that
    nothing writes. A compiler traces tensors of its own classes, for which the call becomes operators.

    x   a tensor, or arguments that hold tensors
    """
    recorder = "torch.jit.trace" if is_jit_tracing() else "make_fx" if _makes_proxies() else ""
    # codes count by their planes, which are what a compiler traces
    if recorder and all(is_plain(part) for part in pytree.tree_leaves(x) if isinstance(part, Tensor)):
        raise NotImplementedError(
            f"{recorder} records a call of Octavo, whose kernels it cannot see, and its program would return what "
            "happened to be in memory; use torch.export.export, or torch.compile, which record the call as operators"
        )


def _makes_proxies() -> bool:
    # torch.func.linearize makes them of a call with a tangent, which is refused for that
    of_derivative = forward_ad._current_level >= 0
    return dispatch_modes() > 0 and not of_derivative and torch._C._get_dispatch_mode(_PROXY) is not None
