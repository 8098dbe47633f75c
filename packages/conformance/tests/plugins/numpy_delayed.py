"""The numpy backend's delayed scaling: the definition's state, in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy_around import write_around

from octavo.formats import FORMAT_MAX
from octavo_numerics import DelayedState, record_amax, update_delayed


def record_in_place(fault: str | None, amax: Any, history: Any, /) -> None:
    """The definition's; the fault takes a maximum that a NaN never leaves."""
    if fault == "records-nan":
        np.maximum(history[0], amax, out=history[0])
        return
    history[...] = record_amax(DelayedState(history, np.ones_like(amax)), amax).history
    write_around(fault, history)


def update_in_place(
    fault: str | None, history: Any, scale: Any, maxima: Sequence[float], /, *, most_recent: bool, reduced: Any
) -> None:
    """The definition's; the fault divides by a subnormal and keeps what comes of it."""
    for operand, maximum in enumerate(maxima):
        after = update_delayed(
            DelayedState(history[operand], scale[operand]),
            "e4m3",
            algorithm="most_recent" if most_recent else "max",
            margin=int(math.log2(FORMAT_MAX["e4m3"] / maximum)),  # the formats' maxima differ by a power of two
            reduced_amax=None if reduced is None else reduced[operand],
        )
        history[operand], scale[operand] = after.history, after.scale
    write_around(fault, scale)
    if fault == "infinite-scales":
        scale[scale == np.finfo(np.float32).max] = np.inf
