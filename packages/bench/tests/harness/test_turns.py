"""Ways to do one thing in turns: who follows whom, and that a clock which falls during a run decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest
import torch

from octavo_bench.harness import timing
from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.pacing import STEADY_MS, steady_turns
from octavo_bench.harness.timing import Call, Times, cuda_times_in_turn, host_times_in_turn, turn_order
from octavo_bench.peers.of_gemms import Candidate, timed_in_turns


class _Device:
    """A device and a host with one clock, in microseconds: it runs a fifth above its clock while it is cool.

    made   what ran, in order
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.made: list[str] = []

    def call(self, name: str, microseconds: float) -> Call:
        def made() -> None:
            self.made.append(name)
            warm = min(1.0, self.now / 80e3)  # after 80 ms the power limit sets the clock
            self.now += microseconds * (0.8 + 0.2 * warm)

        return made


class _Event:
    """A CUDA event that reads the device's clock."""

    def __init__(self, device: _Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.now

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) / 1e3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Device]:
    """In the place of a GPU and of the host's clock."""
    one = _Device()
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: one.now * 1e3)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: one.now / 1e6)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: _Event(one))
    monkeypatch.setattr(timing, "_keep_busy", lambda seconds: None)
    return one


@pytest.mark.parametrize("ways", [1, 2, 3, 4, 5, 7])
def test_each_turn_has_every_way_and_nobody_always_follows_the_same_one(ways: int) -> None:
    """Over as many pairs of turns as there are ways each begins as often, and has every neighbour it can have."""
    turns = [turn_order(ways, turn) for turn in range(2 * ways)]
    assert all(sorted(order) == list(range(ways)) for order in turns)
    assert set(Counter(order[0] for order in turns).values()) == {2}
    followed = Counter(pair for order in turns for pair in pairwise(order))
    for before, after in list(followed):
        assert followed[before, after] == followed[after, before]


@pytest.mark.parametrize("timed", [partial(cuda_times_in_turn, warm_ms=0.0), host_times_in_turn])
def test_a_clock_that_falls_during_a_run_favours_nobody(timed: Callable[..., list[Times]], device: _Device) -> None:
    """The first calls are a fifth faster than the last; the ratios of equal work are 1 all the same."""
    names = ("ours", "theirs", "torch")
    ways = [[device.call(name, us)] for name, us in zip(names, (1000.0, 1000.0, 1500.0), strict=True)]
    ours, theirs, torchs = timed(ways, 30)
    assert ours.median / theirs.median == pytest.approx(1.0, rel=0.01)
    assert torchs.median / ours.median == pytest.approx(1.5, rel=0.01)
    asked = device.made[-90:]
    assert asked[:12] == [
        *("ours", "theirs", "torch"), *("torch", "theirs", "ours"),
        *("theirs", "torch", "ours"), *("ours", "torch", "theirs"),
    ]  # fmt: skip
    assert Counter(asked) == dict.fromkeys(names, 30)


def test_buffers_are_rotated_by_turn(device: _Device) -> None:
    """A way with two sets of buffers takes them in turn, one without does not."""
    ways = [[device.call("a0", 10.0), device.call("a1", 10.0)], [device.call("b", 10.0)]]
    cuda_times_in_turn(ways, 4, warm_ms=0.0)
    assert device.made[-8:] == ["a0", "b", "b", "a1", "b", "a0", "a1", "b"]


class _Queue:
    """A host that queues work and a device that does it, each with a clock in microseconds."""

    def __init__(self) -> None:
        self.host, self.device = 0.0, 0.0

    def call(self, host: float, device: float) -> Call:
        def queue() -> None:
            self.host += host
            self.device = max(self.device, self.host) + device

        return queue

    def record(self) -> float:
        return max(self.device, self.host)

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)


@pytest.mark.parametrize("timed", [timing.cuda_times, cuda_times_in_turn])
def test_a_kernel_is_timed_and_not_the_host_that_queues_it(
    timed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy host a quantizer of 96 us, queued in 300, was recorded with 190 to 830: the device had waited."""

    class Event:
        def __init__(self) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = queue.record()

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) / 1e3

    queue = _Queue()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: queue.host / 1e6)
    monkeypatch.setattr(torch.cuda, "synchronize", queue.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(timing, "_keep_busy", lambda seconds: queue.call(0.0, 1e6 * seconds)())
    call = queue.call(300.0, 96.0)
    ways: Any = [call] if timed is timing.cuda_times else [[call], [call]]
    times = timed(ways, 20, warm_ms=1.0)
    for each in [times] if isinstance(times, Times) else times:
        assert (each.low, each.high) == (pytest.approx(96.0), pytest.approx(96.0))


def test_turns_begin_when_the_clock_has_settled(device: _Device) -> None:
    """All ways have run together for `STEADY_MS` before the first is timed, so that no time is of a cool device."""
    begun: list[float] = []

    class Engine:
        device = "cuda"

        def batch(self, calls: list[Call], count: int) -> float:
            start = device.now
            for index in range(count):
                calls[index % len(calls)]()
            return (device.now - start) / count

        def times_in_turns(self, ways: list[list[Call]], repeats: int) -> list[Times]:
            begun.append(device.now)
            return cuda_times_in_turn(ways, repeats, warm_ms=0.0)

    ways = [[device.call("ours", 700.0)], [device.call("theirs", 900.0)]]
    ours, theirs = steady_turns(cast(Any, Engine()), ways, 12)
    assert begun[0] >= 1e3 * STEADY_MS
    assert (ours.low, ours.high) == (pytest.approx(700.0), pytest.approx(700.0))
    assert theirs.median == pytest.approx(900.0)
    before = device.made[: -2 * 12]
    assert before.count("ours") == before.count("theirs")


def test_a_peer_that_raises_in_between_is_a_note_and_the_others_take_turns(device: _Device) -> None:
    """One that ran by itself may lack memory beside ours; our row and the other peers' rates are there."""

    def lacks_memory(operands: Any) -> Call:
        raise MemoryError("CUDA out of memory")

    plan = [
        Candidate("first", "even", "fprop", lambda operands: device.call("first", 2000.0)),
        Candidate("large", "even", "fprop", lacks_memory),
    ]
    data: Any = type("Drawn", (), {"sets": ({},)})
    engine: Any = TorchEngine("cpu")
    turns = timed_in_turns(engine, [device.call("ours", 1000.0)], data, plan, 9)
    assert list(turns.peers) == ["first"]
    assert turns.peers["first"].median / turns.times.median == pytest.approx(2.0, rel=0.05)
    assert turns.notes == ("large fprop: MemoryError: CUDA out of memory",)
