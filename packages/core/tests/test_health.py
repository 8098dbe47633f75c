"""The numbers that a run logs, from the counts that a backend made."""

from __future__ import annotations

import pytest

from octavo.health import FIELDS, numbers_of


@pytest.mark.parametrize(
    ("counts", "numbers"),
    [
        ({}, {}),
        ({"elements": 8.0, "amax": 3.0}, {"amax": 3.0, "non_finite": 0.0}),
        (
            {"elements": 8.0, "amax": 3.0, "signal": 100.0, "noise": 1.0, "saturated": 2.0, "inexact": 5.0},
            {"amax": 3.0, "non_finite": 0.0, "saturated": 0.25, "underflow": 0.0, "sqnr_db": 20.0, "inexact": 5.0},
        ),
        (
            {"elements": 8.0, "amax": 3.0, "signal": 100.0, "underflow": 4.0, "non_finite": 1.0},
            {"amax": 3.0, "non_finite": 1.0, "saturated": 0.0, "underflow": 0.5},
        ),
    ],
    ids=["nothing seen", "high precision", "inexact", "without noise"],
)
def test_what_there_is_is_logged(counts: dict[str, float], numbers: dict[str, float]) -> None:
    """Shares of the elements that were looked at, and no number of what was not there."""
    found = numbers_of([counts.get(name, 0.0) for name in FIELDS])
    assert found == numbers
