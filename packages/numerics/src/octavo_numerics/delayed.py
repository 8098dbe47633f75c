"""Delayed scaling's state as a value: record an amax, update the scale, for each (tensor, group).

Source: Micikevicius et al., arXiv 2209.05433, section 4; the order of operations is Octavo's (docs/numerics), so
that a group without tokens neither ages nor changes its scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from octavo.errors import one_of
from octavo.formats import FORMAT_MAX, Format
from octavo_numerics.casts import F32
from octavo_numerics.scales import FLT_MAX


@dataclass(frozen=True, slots=True, eq=False)
class DelayedState:
    """The history and scale of one tensor.

    history [H, G] float32   slot 0 collects this step's running amax, the last slot is the latest finished step
    scale   [G] float32      encode scales, which `quantize(..., scale=)` takes
    """

    history: F32
    scale: F32


def init_delayed(groups: int, history: int = 1024) -> DelayedState:
    """The state before the first step: history 0, scale 1."""
    if groups < 1:
        raise ValueError(f"groups={groups}; a tensor has one group or more")
    if history < 2:
        raise ValueError(f"history={history}; give at least 2 slots, one of which collects the running step")
    return DelayedState(np.zeros((history, groups), dtype=np.float32), np.ones(groups, dtype=np.float32))


def _recorded(amax: Any, state: DelayedState, name: str) -> F32:
    """amax [G] in fp32, NaN (which counts as not recorded) as 0."""
    values = np.asarray(amax)
    if values.shape != state.scale.shape:
        raise ValueError(f"{name} has shape {list(values.shape)}; give one per group, {list(state.scale.shape)}")
    if values.dtype != np.float32:
        raise ValueError(f"{name} has dtype {values.dtype}; give float32")
    if (values < 0).any():
        raise ValueError(f"{name} holds {values.min()}; an amax is zero or more")
    return np.where(np.isnan(values), np.float32(0), values)


def record_amax(state: DelayedState, amax: Any) -> DelayedState:
    """The state after one more tensor of this step with these amaxes [G]; NaN counts as not recorded."""
    history = state.history.copy()
    history[0] = np.maximum(history[0], _recorded(amax, state, "amax"))
    return DelayedState(history, state.scale)


@np.errstate(all="ignore")
def update_delayed(
    state: DelayedState,
    fmt: Format,
    *,
    algorithm: Literal["max", "most_recent"] = "max",
    margin: int = 0,
    reduced_amax: Any = None,
) -> DelayedState:
    """The state at the end of a step.

    reduced_amax   [G], this step's amax reduced over ranks; None or 0: what slot 0 collected

    Group by group: last = the reduced amax, or slot 0; a last of 0 leaves the group untouched. am = the maximum of
    the history with slot 0 = last, before the roll ("max"), or last ("most_recent"). The history rolls by -1, last
    goes to the end and slot 0 becomes 0. Where am is finite and more than 0,
    scale = fl(fl(max * 2^-margin) / am), Inf becoming FLT_MAX; else the scale stays.
    """
    one_of("algorithm", algorithm, ("max", "most_recent"))
    last = state.history[0]
    if reduced_amax is not None:
        reduced = _recorded(reduced_amax, state, "reduced_amax")
        last = np.where(reduced != 0, reduced, last)
    seen = last != 0
    amax = np.maximum(last, state.history[1:].max(axis=0)) if algorithm == "max" else last
    rolled = np.roll(state.history, -1, axis=0)
    rolled[-1] = last
    rolled[0] = 0
    numerator = np.float32(np.ldexp(FORMAT_MAX[fmt], -margin))
    scale = np.minimum(numerator / amax, FLT_MAX)
    usable = seen & np.isfinite(amax) & (amax > 0)
    return DelayedState(np.where(seen, rolled, state.history), np.where(usable, scale, state.scale))
