"""Which kernel a backend would run, and why: what `octavo why --kernels` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from octavo import OctavoError
from octavo_registry.discovery.guard import Fault, guard

if TYPE_CHECKING:
    from octavo_registry.contract.request import Request


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """One way in which a backend could compute a GEMM, and what its model expects of it.

    name          of the kernel or tile, for people
    tiles         output tiles that are computed, partly filled ones included
    waves         tiles a processor of the device computes one after another
    filled        part of the computed outputs that the result has, 0 to 1
    microseconds  expected time
    chosen        True for the one that runs
    """

    name: str
    tiles: int
    waves: float
    filled: float
    microseconds: float
    chosen: bool


class KernelModel(Protocol):
    """What a `Backend` may have beside `refuses` and `bind`; it is looked up with getattr, and absent is fine."""

    def kernels(self, request: Request, rows: int) -> tuple[KernelChoice, ...]:
        """The choices for a GEMM request that the backend serves, with `rows` rows in equal groups: best first.

        Empty where nothing is chosen: other operations, devices with one kernel.
        """


def ask_kernels(backend: object, name: str, request: Request, rows: int) -> tuple[KernelChoice, ...] | None:
    """What `backend` answers; None where it has no model. OctavoError where it breaks or answers in another type."""
    method: Any = getattr(backend, "kernels", None)
    if method is None:
        return None
    try:
        choices = guard(lambda: tuple(method(request, rows)))
    except Fault as fault:
        raise OctavoError(f"{name} cannot say which kernels it has: {fault}") from fault
    strange = next((choice for choice in choices if not isinstance(choice, KernelChoice)), None)
    if strange is not None:
        raise OctavoError(
            f"{name} lists a {type(strange).__name__} among its kernels; it lists octavo_registry.KernelChoice"
        )
    return choices
