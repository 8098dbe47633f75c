"""Delayed scaling's state, which a backend may change in place: the definition's bits, whatever was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from octavo.formats import FORMAT_MAX, Format
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.oracles.keeping import Surrounded
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import Array, Rng
from octavo_numerics import DelayedState, record_amax, update_delayed

GROUPS = 260
"""More than a block of threads has, and no multiple of a vector's elements."""

SLOTS = (2, 5, 18)
FORMATS: tuple[Format, ...] = ("e4m3", "e4m3", "e5m2")
ALGORITHMS: tuple[Literal["max", "most_recent"], ...] = ("max", "most_recent")
ODD = np.array([0, 1e-45, 1e-39, 3.4028235e38, np.inf, np.nan], np.float32)


def _amaxes(rng: Rng, *shape: int) -> Array:
    """Of every magnitude; a third of them are zeros, subnormals, the largest number, infinities and NaN."""
    usual = np.exp2(rng.uniform(-30, 30, shape)).astype(np.float32)
    return np.where(rng.random(shape) < 0.3, rng.choice(ODD, shape), usual)


def _state(rng: Rng, slots: int) -> DelayedState:
    """After steps and amaxes of the running one; a NaN is never in a history."""
    return DelayedState(
        np.nan_to_num(_amaxes(rng, slots, GROUPS), posinf=np.inf),
        np.exp2(rng.uniform(-9, 9, GROUPS)).astype(np.float32),
    )


def _part(case: Case, name: Literal["record_amax", "update_scales"]) -> Callable[..., None]:
    part: Callable[..., None] | None = getattr(case.plan("quantize", groups=GROUPS).bound, name)
    if part is None:
        pytest.skip(f"the answer has no {name}: front ends use operations of their own")
    return part


@needs("quantize", selections.delayed)
def test_an_amax_is_recorded(case: Case, rng: Rng) -> None:
    """`record_amax` raises slot 0 of an operand's history to what is larger, again and again in a step, and leaves the
    other slots alone; NaN counts as not recorded."""
    record = _part(case, "record_amax")
    for slots in SLOTS:
        state = _state(rng, slots)
        memory = Surrounded(case)
        history = memory.array(state.history)
        for number in range(2):
            amax = _amaxes(rng, GROUPS)
            given = case.array(amax)
            record(given, history)
            state = record_amax(state, amax)
            assert_same_bits(case.numpy(history), state.history, f"{slots} slots after record_amax number {number}")
            assert_same_bits(case.numpy(given), amax, "amax, which record_amax was given and may not write,")
        memory.assert_unwritten("record_amax")


@needs("quantize", selections.delayed)
def test_scales_of_the_next_step(case: Case, rng: Rng) -> None:
    """`update_scales` rolls the histories and writes the scales of three operands, by both algorithms, from what this
    rank has measured and from what all have. A group without tokens keeps both; zeros, subnormals and infinities make
    no scale that is not finite."""
    update = _part(case, "update_scales")
    for slots, algorithm, is_reduced in [(s, a, r) for s in SLOTS for a in ALGORITHMS for r in (False, True)]:
        states = [_state(rng, slots) for _ in FORMATS]
        margins = [int(margin) for margin in rng.integers(-64, 65, len(FORMATS))]
        reduced = _amaxes(rng, len(FORMATS), GROUPS) if is_reduced else None
        memory = Surrounded(case)
        history, scale = (memory.array(np.stack([getattr(s, name) for s in states])) for name in ("history", "scale"))
        maxima = [math.ldexp(FORMAT_MAX[fmt], -margin) for fmt, margin in zip(FORMATS, margins, strict=True)]
        given = None if reduced is None else case.array(reduced)
        update(history, scale, maxima, most_recent=algorithm == "most_recent", reduced=given)
        what = f"of {slots} slots by {algorithm}, {'reduced' if is_reduced else 'not reduced'}"
        made: list[Any] = [case.numpy(history), case.numpy(scale)]
        for number, (state, fmt, margin) in enumerate(zip(states, FORMATS, margins, strict=True)):
            amax = None if reduced is None else reduced[number]
            expected = update_delayed(state, fmt, algorithm=algorithm, margin=margin, reduced_amax=amax)
            assert_same_bits(made[0][number], expected.history, f"history of operand {number} {what}")
            assert_same_bits(made[1][number], expected.scale, f"scale of operand {number} {what}")
        memory.assert_unwritten("update_scales")
