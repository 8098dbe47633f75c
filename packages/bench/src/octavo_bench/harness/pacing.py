"""Times that clocks do not decide: a GPU under load is as fast as its power allows, and an idle one runs faster.

What ran in the seconds before a measurement changes it by more than many kernels differ. So a single time is taken
after a while of the same work, ways to do one thing take turns after such a while, and two engines are compared in
batches that take turns, which see one clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.timing import Call, Times

STEADY_MS = 100.0
"""Of the same work before it is timed. An H200 ran 784 TFLOP/s at first and 690 from a tenth of a second on."""

_MOST_CALLS = 5000
_ROUNDS = 7
_BATCH_MS = 40.0
_MOST_PER_BATCH = 100


def steady_times(engine: Engine, calls: Sequence[Call], repeats: int) -> Times:
    """`engine.times`, on a GPU after `STEADY_MS` of the calls, so that the order of measurements favours nobody."""
    _settle(engine, calls)
    return engine.times(calls, repeats)


def steady_turns(engine: Engine, ways: Sequence[Sequence[Call]], repeats: int) -> list[Times]:
    """`engine.times_in_turns`, on a GPU after `STEADY_MS` of the same calls: ratios of one run at one clock."""
    _settle(engine, [calls[0] for calls in ways])
    return engine.times_in_turns(ways, repeats)


def _settle(engine: Engine, calls: Sequence[Call]) -> None:
    """Runs each of the calls, as many rounds of them as `STEADY_MS` takes; nothing on a CPU."""
    if engine.device != "cuda":
        return
    each = len(calls)
    engine.batch(calls, each)
    rounds = math.ceil(1e3 * STEADY_MS / (each * engine.batch(calls, 2 * each)))
    engine.batch(calls, min(each * rounds, _MOST_CALLS))


def time_ratio(first: tuple[Engine, Sequence[Call]], second: tuple[Engine, Sequence[Call]]) -> float:
    """The time per call of the second over the first's: the median over rounds of one batch each.

    The calls have run before: nothing is set up any more.
    """
    sides = (first, second)
    rounds, count = 2, 1
    if first[0].device == "cuda":
        slowest = max([engine.batch(calls, 2) for engine, calls in sides * 2][-2:])
        rounds, count = _ROUNDS, max(2, min(_MOST_PER_BATCH, math.ceil(1e3 * _BATCH_MS / slowest)))
    ratios = []
    for _ in range(rounds):
        before, after = (engine.batch(calls, count) for engine, calls in sides)
        ratios.append(after / before)
    return statistics.median(ratios)
