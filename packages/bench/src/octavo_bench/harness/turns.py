"""The same step in two frameworks, timed in turns.

A GPU under load is as fast as its power allows, which depends on what ran in the seconds before: times of one framework
after the other differ by more than the frameworks do. Batches of each in turns see the same device, and one clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.timing import Call

_ROUNDS = 7
_BATCH_MS = 40.0
_MOST_A_BATCH = 100


def over(first: tuple[Engine, Sequence[Call]], second: tuple[Engine, Sequence[Call]]) -> float:
    """The time of a call of the second over one of the first: the median over rounds of a batch of each.

    Calls have run before: nothing is set up any more.
    """
    sides = (first, second)
    rounds, count = 2, 1
    if first[0].device == "cuda":
        slowest = max([engine.batch(calls, 2) for engine, calls in sides * 2][-2:])
        rounds, count = _ROUNDS, max(2, min(_MOST_A_BATCH, math.ceil(1e3 * _BATCH_MS / slowest)))
    ratios = []
    for _ in range(rounds):
        before, after = (engine.batch(calls, count) for engine, calls in sides)
        ratios.append(after / before)
    return statistics.median(ratios)
