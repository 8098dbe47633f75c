"""Delayed scaling's state: pure, ageless where there were no tokens, deaf to NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo_numerics import init_delayed, record_amax, update_delayed


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_the_running_maximum_is_kept_until_the_update() -> None:
    """Two microbatches of one step: the larger amax counts, and the argument's state is unchanged."""
    state = init_delayed(2, 3)
    first = record_amax(state, f32(2, 8))
    second = record_amax(first, f32(4, 1))
    assert state.history.tolist() == [[0, 0]] * 3
    assert first.history[0].tolist() == [2, 8]
    assert second.history[0].tolist() == [4, 8]
    done = update_delayed(second, "e4m3")
    assert done.history.tolist() == [[0, 0], [0, 0], [4, 8]]
    assert done.scale.tolist() == [112, 56]


def test_a_group_without_tokens_does_not_age() -> None:
    """History and scale of a group whose amax is 0 stay while another's move (numerics.md, delayed scaling)."""
    state = init_delayed(2, 2)
    state = update_delayed(record_amax(state, f32(7, 7)), "e4m3")
    later = state
    for _ in range(5):
        later = update_delayed(record_amax(later, f32(0, 14)), "e4m3")
    assert later.history[:, 0].tolist() == state.history[:, 0].tolist()
    assert later.scale.tolist() == [64, 32]


def test_the_maximum_forgets_after_the_history() -> None:
    """With H slots an amax counts in its own update and in H - 1 more."""
    state = update_delayed(record_amax(init_delayed(1, 3), f32(448)), "e4m3")
    scales = []
    for _ in range(4):
        state = update_delayed(record_amax(state, f32(1)), "e4m3")
        scales.append(float(state.scale[0]))
    assert scales == [1, 1, 448, 448]


def test_nan_is_not_recorded_and_inf_keeps_the_scale() -> None:
    """A NaN amax is as none; an infinite one enters the history and leaves the scale."""
    state = update_delayed(record_amax(init_delayed(1, 3), f32(7)), "e4m3")
    nan = update_delayed(record_amax(state, f32(np.nan)), "e4m3")
    assert nan.history.tolist() == state.history.tolist()
    inf = update_delayed(record_amax(state, f32(np.inf)), "e4m3")
    assert inf.scale.tolist() == [64]
    assert inf.history[:, 0].tolist() == [0, 7, np.inf]


def test_the_reduced_amax_wins_unless_it_is_zero() -> None:
    """Reduced over ranks; 0 or NaN falls back to what slot 0 collected (faults.md 54)."""
    state = record_amax(init_delayed(3, 2), f32(1, 2, 4))
    done = update_delayed(state, "e5m2", reduced_amax=f32(8, 0, np.nan))
    assert done.history[-1].tolist() == [8, 2, 4]


def test_most_recent_margin_and_overflow() -> None:
    """Only the last amax counts; margin halves; an overflowing quotient is FLT_MAX."""
    state = update_delayed(record_amax(init_delayed(1, 4), f32(448)), "e4m3")
    state = record_amax(state, f32(1))
    assert update_delayed(state, "e4m3", algorithm="most_recent").scale.tolist() == [448]
    assert update_delayed(state, "e4m3", algorithm="most_recent", margin=3).scale.tolist() == [56]
    assert update_delayed(state, "e4m3", margin=-1).scale.tolist() == [2]
    tiny = update_delayed(record_amax(init_delayed(1, 2), f32(1e-45)), "e4m3")
    assert tiny.scale.tolist() == [np.finfo(np.float32).max]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: init_delayed(0), "groups=0; a tensor has one group or more"),
        (lambda: init_delayed(2, 1), "history=1; give at least 2 slots"),
        (lambda: record_amax(init_delayed(2), f32(1)), r"amax has shape \[1\]; give one per group, \[2\]"),
        (lambda: record_amax(init_delayed(1), np.ones(1)), "amax has dtype float64; give float32"),
        (lambda: record_amax(init_delayed(1), f32(-1)), "amax holds -1.0; an amax is zero or more"),
        (lambda: update_delayed(init_delayed(1), "e4m3", algorithm="mean"), "algorithm is 'mean'; give"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_named(call: Any, message: str) -> None:
    """One line with the argument, its value and the fix."""
    with pytest.raises(ValueError, match=message):
        call()
