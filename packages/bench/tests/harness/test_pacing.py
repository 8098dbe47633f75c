"""Times that the clocks do not decide: steady ones, and two engines in turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from octavo_bench.harness import run as run_module
from octavo_bench.harness.pacing import time_ratio
from octavo_bench.harness.timing import Call


class _Clock:
    """An engine whose device takes longer from batch to batch, as one that gets warm."""

    device = "cuda"
    elapsed = 1.0

    def __init__(self, cost: float) -> None:
        self.cost = cost

    def batch(self, calls: Sequence[Call], count: int) -> float:
        for index in range(count):
            calls[index % len(calls)]()
        _Clock.elapsed += 0.01
        return 1e3 * self.cost * _Clock.elapsed


def test_frameworks_are_compared_in_turns() -> None:
    """A device that slows down by a tenth during the run changes a ratio by what it slows down in one turn."""
    calls: list[str] = []
    first, second = _Clock(2.0), _Clock(2.1)
    sides = ((cast(Any, first), [lambda: calls.append("a")]), (cast(Any, second), [lambda: calls.append("b")]))
    assert time_ratio(*sides) == pytest.approx(1.05, rel=0.01)
    assert calls.count("a") == calls.count("b")
    assert "ab" in "".join(calls)
    assert "ba" in "".join(calls)


def test_a_run_says_how_long_the_rest_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first seconds and then now and then, by the products that are done."""
    now = [100.0]
    monkeypatch.setattr(run_module.time, "perf_counter", lambda: now[0])
    pace = run_module.Pace(rows=5, flops=10.0, start=now[0])
    lines = []
    for seconds, flops in ((1.0, 1.0), (4.0, 1.0), (2.0, 2.0), (20.0, 4.0), (1.0, 2.0)):
        now[0] += seconds
        lines.append(pace.after(flops))
    assert lines == [
        "",
        "  2 of about 5 rows after 5 s; about 20 s to go",
        "",
        "  4 of about 5 rows after 27 s; about 7 s to go",
        "",
    ]
