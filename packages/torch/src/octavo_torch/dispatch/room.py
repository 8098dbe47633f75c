"""Room: the multiprocessors that a call leaves to what runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from octavo_registry.dispatch import limits
from octavo_registry.dispatch.layer_plan import GemmPlan
from octavo_torch.arrays.checks import brief


class Room:
    """Multiprocessors of a CUDA device that a call leaves to what runs beside it. No bit depends on it.

    gemms   every GEMM of the call, forward and backward, leaves so many: to a collective, for instance, which otherwise
            waits until the GEMM has ended, or keeps it waiting
    w2      of an MLP and of a MoE layer, where w2 is quantized in the call: fc1's product leaves so many to w2's
            quantizer, which runs beside it on a stream of its own. None: after it, on the caller's stream

    On a CPU there are no multiprocessors to leave. `w2` changes nothing if w2 is quantized already; and with adapters,
    an observer that counts, or torch.compile, w2 is quantized on the caller's stream. If a backend cannot leave
    multiprocessors, the call raises OctavoError.
    """

    # not a frozen dataclass: dynamo does not take one for a constant, even where pytree does
    __slots__ = ("gemms", "w2")

    gemms: int
    w2: int | None

    def __init__(self, gemms: int = 0, w2: int | None = None) -> None:
        for name, value, least in (("gemms", gemms, 0), ("w2", w2, 1)):
            if (value is not None or name == "gemms") and (type(value) is not int or value < least):
                raise ValueError(f"Room's {name} is {brief(value)}; give a number of multiprocessors, {least} or more")
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} of {self} cannot be set; make another Room")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Room) and (self.gemms, self.w2) == (other.gemms, other.w2)

    def __hash__(self) -> int:
        return hash((self.gemms, self.w2))

    def __repr__(self) -> str:
        return f"Room(gemms={self.gemms}, w2={self.w2})"

    def __reduce__(self) -> tuple[type[Room], tuple[int, int | None]]:
        return Room, (self.gemms, self.w2)


pytree.register_constant(Room)


def check_room(room: object, of_mlp: bool = True) -> None:
    """ValueError unless `room` is None or a Room, and for Room(w2=...) in a call that has no w2."""
    if room is None:
        return
    if not isinstance(room, Room):
        raise ValueError(f"room is {brief(room)}; give an octavo_torch.Room")
    if room.w2 is not None and not of_mlp:
        raise ValueError(f"room is {room} and one layer has no w2; give Room(gemms=...)")


def within(plan: GemmPlan, device: torch.device, left: int) -> Callable[..., Any]:
    """The plan's function on all multiprocessors of the device but `left`; OctavoError and ValueError as `limits`."""
    have = torch.cuda.get_device_properties(device).multi_processor_count
    return limits.within(plan, left, have, str(device))
