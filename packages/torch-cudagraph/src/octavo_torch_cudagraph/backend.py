"""CudaGraphBackend: torch-native's kernels in plans that take nothing from the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.recipe_base import GEMMS
from octavo_registry.contract import (
    AnyBound,
    AnyBoundWgrad,
    AnyRequest,
    Backend,
    BoundDgrad,
    BoundFprop,
    BoundQuantize,
    BoundWgrad,
    GemmRequest,
)
from octavo_torch.plugin_api import GraphUnsafeError, is_capturing, status_word
from octavo_torch_native.backend import NativeBackend

if TYPE_CHECKING:
    from octavo_registry.contract import KernelChoice


_SIZES_AT: Mapping[str, int] = {
    **dict.fromkeys(GEMMS, 2),
    "quantize": 1,
    "act_quantize": 1,
    "dact_quantize": 2,
    "norm_quantize": 3,
}
"""Where group sizes stand among a bound function's arguments, for operations that take them."""


class CudaGraphBackend(Backend):
    """Serves what its card admits: device sizes, CUDA devices.

    Results and scratch come from torch's allocator, which gives a captured call memory of the graph's own pool and
    stream: addresses are the same at every replay, and nothing else uses them.
    """

    def __init__(self) -> None:
        self._native = NativeBackend()

    def refuses(self, request: AnyRequest) -> str | None:
        """What torch-native refuses, and a first call inside a capture: the status word has to be created outside."""
        reason = self._native.refuses(request)
        if reason is None and is_capturing():
            try:
                status_word(torch.device("cuda", torch.cuda.current_device()))
            except GraphUnsafeError as error:
                return str(error)
        return reason

    def refuses_everywhere(self, request: AnyRequest) -> str | None:
        """torch-native's: the kernels are the same."""
        return self._native.refuses_everywhere(request)

    def bind(self, request: AnyRequest) -> AnyBound:
        """torch-native's function, which refuses sizes in host memory."""
        from octavo_torch_cudagraph.sizes import device_plan

        bound = self._native.bind(request)
        position = _SIZES_AT.get(request.op)
        if position is None:
            return bound
        checked: dict[str, Any] = {"run": _checked(bound.run, position), "prepare": device_plan}
        if isinstance(bound, BoundFprop | BoundDgrad | BoundWgrad) and bound.limited is not None:
            checked["limited"] = _limited(bound.limited, position)
        if isinstance(bound, BoundWgrad) and bound.interleaved is not None:
            checked["interleaved"] = _interleaved(bound.interleaved, position)
        if isinstance(bound, BoundQuantize):
            if bound.with_amax is not None:
                checked["with_amax"] = _checked(bound.with_amax, position)
            if bound.of_tokens is not None:
                checked["of_tokens"] = _checked(bound.of_tokens, position)
        return replace(bound, **checked)

    def kernels(self, request: GemmRequest, rows: int) -> tuple[KernelChoice, ...]:
        """torch-native's: the kernels are the same."""
        return self._native.kernels(request, rows)


def _limited(limited: Callable[[int], Callable[..., Any]], position: int) -> Callable[[int], Callable[..., Any]]:
    """`limited`, with each function that it returns `_checked`."""
    return lambda multiprocessors: _checked(limited(multiprocessors), position)


def _interleaved(
    interleaved: Callable[[int], AnyBoundWgrad | None], position: int
) -> Callable[[int], AnyBoundWgrad | None]:
    """`interleaved`, with the functions of each answer `_checked`."""

    def answer(block: int) -> AnyBoundWgrad | None:
        bound = interleaved(block)
        if bound is None:
            return None
        limited = None if bound.limited is None else _limited(bound.limited, position)
        return replace(bound, run=_checked(bound.run, position), limited=limited)

    return answer


def _checked(run: Callable[..., Any], position: int) -> Callable[..., Any]:
    """`run`, which refuses a tensor in host memory as the argument at `position`, its group sizes."""
    from octavo_torch_cudagraph.sizes import check_sizes

    @wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        sizes = args[position] if len(args) > position else kwargs.get("group_sizes")
        if isinstance(sizes, Tensor) and sizes.is_cpu:
            check_sizes(sizes, args[0])
        return run(*args, **kwargs)

    return call
