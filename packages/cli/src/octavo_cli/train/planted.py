"""Backends that are wrong on purpose: a gate that lets one of them pass would mean nothing.

Each is the torch reference backend with one operation spoilt after the fact, registered for one block and preferred
there, closed: nothing else serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import octavo_registry
from octavo_registry import BackendCard, Request, hookimpl
from octavo_registry.contract.backend import AnyBound, Backend
from octavo_registry.contract.operations import OPERATIONS
from octavo_registry.contract.request import AnyRequest
from octavo_torch import plugin as reference

Spoil = Callable[[Request, Any, Any], None]
"""(request, group sizes, result): change the result in place."""


def _halve_scale(request: Request, sizes: Any, result: Any) -> None:
    """The decode scales of x, as fprop reads them, are half of what they should be."""
    spec = request.quantizer
    if request.op == "quantize" and spec is not None and spec.role == "x" and result.rowwise is not None:
        result.rowwise_scale = result.rowwise_scale * 0.5


def _drop_wgrad(request: Request, sizes: Any, result: Any) -> None:
    """The weight gradient is zero: the experts never train."""
    if request.op == "wgrad":
        result.zero_()


def _zero_experts(request: Request, sizes: Any, result: Any) -> None:
    """The first half of the experts answers with zeros."""
    if request.op == "fprop":
        result[: int(sizes[: len(sizes) // 2].sum())] = 0


FAULTS: dict[str, Spoil] = {"halved-scale": _halve_scale, "no-wgrad": _drop_wgrad, "zeroed-experts": _zero_experts}
"""Faults that the training gates must see, by name."""


class _Faulty(Backend):
    def __init__(self, spoil: Spoil) -> None:
        self._spoil = spoil
        backend = reference.octavo_load(reference.NAME)
        assert backend is not None  # its own module's name
        self._right: Backend = backend

    def refuses(self, request: AnyRequest) -> str | None:
        return self._right.refuses(request)

    def bind(self, request: AnyRequest) -> AnyBound:
        bound = self._right.bind(request)
        right: Callable[..., Any] = bound.run

        def wrong(first: Any, second: Any = None, *more: Any, **options: Any) -> Any:
            result = right(first, second, *more, **options)
            self._spoil(request, second if request.op == "quantize" else more[0], result)
            return result

        answer: AnyBound = OPERATIONS[request.op].bound(wrong)  # type: ignore[assignment]
        return answer


class _Plugin:
    def __init__(self, name: str, spoil: Spoil) -> None:
        self._name, self._spoil = name, spoil

    @hookimpl
    def octavo_backends(self) -> tuple[BackendCard, ...]:
        return (BackendCard(**{**dict(reference.CARD), "name": self._name, "summary": "wrong on purpose"}),)

    @hookimpl
    def octavo_load(self, name: str) -> Backend | None:
        return _Faulty(self._spoil) if name == self._name else None


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Inside the block every torch operation runs on the backend with this fault."""
    name = f"planted-{fault}"
    octavo_registry.register(_Plugin(name, FAULTS[fault]), name)
    try:
        with octavo_registry.prefer(name):
            yield
    finally:
        octavo_registry.unregister(name)
