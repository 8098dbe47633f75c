"""Clocks: CUDA events around calls that are queued without a pause, graph replays, and the host's own clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

Call = Callable[[], Any]

MOST_COPIES = 64
"""Input sets that are rotated at most; smaller problems than a 64th of three caches are measured partly from cache."""

_LONGEST_HEAD_START = 0.5
"""Seconds that a device is kept busy at most; a call that takes the host that long waits for the device by itself."""


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds: the median, and the tenth and ninetieth percentile, which say what difference is noise."""

    median: float
    low: float
    high: float

    @property
    def ms(self) -> float:
        """The median in milliseconds."""
        return self.median / 1e3

    def as_dict(self) -> dict[str, float]:
        """Plain values for JSON, in microseconds."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def summary(times: Sequence[float]) -> Times:
    """Median and spread of single times in microseconds."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return Times(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


def input_copies(nbytes: int, cache: int) -> int:
    """Copies of an input of `nbytes` whose sum exceeds three caches of `cache` bytes: each call then finds it cold."""
    return min(MOST_COPIES, max(1, math.ceil(3 * cache / max(nbytes, 1))))


def affordable(repeats: int, microseconds: float, budget_ms: float) -> int:
    """Calls of this length that fit into the budget: `repeats` at most, and never fewer than three."""
    return max(3, min(repeats, int(1e3 * budget_ms / max(microseconds, 1e-3))))


def cuda_times(calls: Sequence[Call], repeats: int, warm_ms: float = 20.0) -> Times:
    """Device time of one call. `calls` are the same work on different buffers, taken in turn.

    Everything is queued before the one synchronization, behind products that last until the host is done, so the
    device never waits for the host. `warm_ms` of the same calls come first: an idle GPU's clocks are low.
    """
    import torch

    _keep_busy(repeats * _warm_up(calls[:10], warm_ms))
    starts, ends = _events(repeats), _events(repeats)
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        call = calls[index % len(calls)]
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return summary([1e3 * start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)])


def turn_order(ways: int, turn: int) -> list[int]:
    """Whose call follows whose in a turn: every second one goes backwards, and each pair begins with another way.

    So nobody always runs after the same one, whose heat and whose lines in the cache it would inherit.
    """
    order = [(at + turn // 2) % ways for at in range(ways)]
    return order[::-1] if turn % 2 else order


def times_in_turn(
    ways: Sequence[Sequence[Call]], turns: int, lasted: Callable[[Sequence[Call]], Sequence[float]]
) -> list[Times]:
    """Times of several ways to do the same work, one call of each in every turn: all meet the same clocks.

    lasted   makes the calls one after another and returns the microseconds of each
    """
    order = [(way, turn) for turn in range(turns) for way in turn_order(len(ways), turn)]
    spent = lasted([ways[way][turn % len(ways[way])] for way, turn in order])
    of_ways: list[list[float]] = [[] for _ in ways]
    for (way, _), microseconds in zip(order, spent, strict=True):
        of_ways[way].append(microseconds)
    return [summary(each) for each in of_ways]


def cuda_times_in_turn(ways: Sequence[Sequence[Call]], repeats: int, warm_ms: float = 100.0) -> list[Times]:
    """`times_in_turn` by CUDA events around calls that are queued as those of `cuda_times` are."""
    each = _warm_up([calls[index % len(calls)] for index in range(min(repeats, 2)) for calls in ways], warm_ms)
    return times_in_turn(ways, repeats, partial(_queued, host_seconds=each))


def host_times_in_turn(ways: Sequence[Sequence[Call]], repeats: int) -> list[Times]:
    """`times_in_turn` by the host's clock, after a call of each."""
    for calls in ways:
        calls[0]()
    return times_in_turn(ways, repeats, lambda calls: [host_us(call) for call in calls])


def _queued(calls: Sequence[Call], host_seconds: float) -> list[float]:
    import torch

    _keep_busy(len(calls) * host_seconds)
    marks = _events(len(calls) + 1)
    marks[0].record()
    for call, mark in zip(calls, marks[1:], strict=True):
        call()
        mark.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in pairwise(marks)]


def _warm_up(calls: Sequence[Call], warm_ms: float) -> float:
    """Runs `calls` for `warm_ms`, at least once each; the seconds that the host took to queue one of them at last."""
    import torch

    until = time.perf_counter() + warm_ms / 1e3
    while True:
        start = time.perf_counter()
        for call in calls:
            call()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        if time.perf_counter() > until:
            return (queued - start) / len(calls)


def _keep_busy(seconds: float) -> None:
    """Queues bf16 products that take the device half as long again, so that the host gets ahead of it."""
    import torch

    side, fastest = 4096, 3e15  # no GPU multiplies bf16 faster
    count = math.ceil(1.5 * min(seconds, _LONGEST_HEAD_START) * fastest / (2 * side**3))
    values = torch.randn(side, side, device="cuda").bfloat16()
    out = torch.empty_like(values)
    for _ in range(count):
        torch.mm(values, values, out=out)


def _events(count: int) -> list[Any]:
    import torch

    event: Any = torch.cuda.Event  # torch leaves its constructor untyped
    return [event(enable_timing=True) for _ in range(count)]


def cuda_graph_times(call: Call, repeats: int, launches: int = 20) -> Times:
    """Device time of a call too short to launch one by one: `launches` of it in a captured graph, replayed."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    times = cuda_times([graph.replay], repeats)
    return Times(times.median / launches, times.low / launches, times.high / launches)


def host_times(call: Call, repeats: int, warmup: int = 3) -> Times:
    """Host time of one call; on a GPU that is the launch, since nothing waits for the device."""
    for _ in range(warmup):
        call()
    return summary([host_us(call) for _ in range(repeats)])


def host_us(call: Call) -> float:
    """Microseconds of the host for one call."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3
