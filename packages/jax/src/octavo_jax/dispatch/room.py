"""Room: the multiprocessors that a call leaves to what runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from octavo_jax.memo import Interned
from octavo_registry import LayerPlan
from octavo_registry.contract.plan import Plan
from octavo_registry.dispatch.limits import within

Gemm = TypeVar("Gemm", bound=Plan[Any, Any])


@dataclass(frozen=True, slots=True)
class Room:
    """Multiprocessors of a GPU that a call leaves to what runs beside it. No bit depends on it.

    gemms   every GEMM of the call, forward and backward, leaves so many: to a collective, for instance, which otherwise
            waits until the GEMM has ended, or keeps it waiting

    XLA decides what runs beside what, and whether anything does. So there is no `w2` as octavo_torch.Room has it, which
    puts w2's quantizer beside fc1's product.

    On a CPU there are no multiprocessors to leave. If a backend cannot leave any, the call raises OctavoError.
    """

    gemms: int = 0

    def __post_init__(self) -> None:
        if type(self.gemms) is not int or self.gemms < 0:
            raise ValueError(f"Room's gemms is {self.gemms!r}; give a number of multiprocessors, 0 or more")


def check_room(room: object) -> Room | None:
    """`room`, or None if it leaves nothing; ValueError unless it is a Room or None."""
    if room is None:
        return None
    if not isinstance(room, Room):
        raise ValueError(f"room is {room!r}; give an octavo_jax.Room")
    return room if room.gemms else None


_interned: Interned[Callable[..., Any]] = Interned()


def plan_with_room(plan: LayerPlan, room: Room, multiprocessors: int, device: str) -> LayerPlan:
    """The plan with GEMMs that run on the device's `multiprocessors` except those that `room` leaves.

    Equal arguments give the same functions, so nothing is traced twice. Raises as `within` does.
    """
    used = multiprocessors - room.gemms

    def limited(gemm: Gemm) -> Gemm:
        run = _interned.of((gemm.run, used), lambda: within(gemm, room.gemms, multiprocessors, device))
        note = "; ".join(part for part in (gemm.note, f"on {used} of {multiprocessors} multiprocessors") if part)
        return replace(gemm, bound=replace(gemm.bound, run=run), note=note)

    return replace(
        plan,
        fprop=limited(plan.fprop),
        dgrad=None if plan.dgrad is None else limited(plan.dgrad),
        wgrad=None if plan.wgrad is None else limited(plan.wgrad),
    )
