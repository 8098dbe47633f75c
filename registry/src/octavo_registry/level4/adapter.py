"""Backends and answers of API level 4 as those of the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo_registry.contract.backend import AnyBound, Backend, KernelChoice
from octavo_registry.contract.cards import QUANTIZERS, Op
from octavo_registry.contract.operations import OPERATIONS
from octavo_registry.contract.quantize import BoundQuantize
from octavo_registry.contract.request import AnyRequest, GemmRequest
from octavo_registry.level4.bound import Bound
from octavo_registry.level4.request import flat

LEVEL = 4


class AdaptedBackend(Backend):
    """A backend of level 4, which has `refuses`, `bind` and perhaps `kernels`, and is asked with its own requests."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def refuses(self, request: AnyRequest) -> str | None:
        """Its answer."""
        reason: str | None = self._backend.refuses(flat(request))
        return reason

    def refuses_everywhere(self, request: AnyRequest) -> str | None:
        """None: level 4 has no such method."""
        return None

    def bind(self, request: AnyRequest) -> AnyBound:
        """Its answer, of level 4: whoever binds checks it, and then it is `adapted`."""
        bound: AnyBound = self._backend.bind(flat(request))
        return bound

    def kernels(self, request: GemmRequest, rows: int) -> tuple[KernelChoice, ...] | None:
        """Its answer; None where it has no such method."""
        kernels: Callable[..., tuple[KernelChoice, ...]] | None = getattr(self._backend, "kernels", None)
        return None if kernels is None else kernels(flat(request), rows)


def adapted(bound: Bound, op: Op) -> AnyBound:
    """Level 4's answer in the class of the operation."""
    shared: dict[str, Any] = {"layouts": bound.layouts, "note": bound.note, "prepare": bound.prepare}
    if op == "quantize":
        return BoundQuantize(
            bound.run,
            **shared,
            with_amax=bound.run_with_amax,
            from_plain=getattr(bound.run, "from_plain", None),
            to_plain=getattr(bound.run, "to_plain", None),
            update_scales=bound.update_scales,
        )
    run = _with_wanted(bound.run) if op in QUANTIZERS else bound.run
    answer: AnyBound = OPERATIONS[op].bound(run, **shared)  # type: ignore[assignment]
    return answer


def _with_wanted(run: Callable[..., Any]) -> Callable[..., Any]:
    """A fused quantizer that takes `wanted`, and makes all extras whatever it says: level 4's need not have it."""

    def fused(*arrays: Any, wanted: Any = None, **options: Any) -> Any:
        return run(*arrays, **options)

    return fused
