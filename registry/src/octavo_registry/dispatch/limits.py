"""A GEMM on some of a device's multiprocessors, which leaves the others to what runs beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo import OctavoError
from octavo_registry.dispatch.layer_plan import GemmPlan


def within(plan: GemmPlan, left: int, have: int, device: str) -> Callable[..., Any]:
    """The plan's function on all `have` multiprocessors of the device but `left`.

    Raises OctavoError where the backend cannot leave any, ValueError where the device has no more than those.
    """
    if plan.bound.limited is None:
        raise OctavoError(
            f"room leaves {left} multiprocessors to others and {plan.backend} has no limit for its {plan.request.op}; "
            f"leave room out, or choose a backend that has one, such as {plan.request.framework}-native"
        )
    if left >= have:
        raise ValueError(f"room leaves {left} multiprocessors to others and {device} has {have}; leave fewer")
    limited: Callable[..., Any] = plan.bound.limited(have - left)
    return limited
