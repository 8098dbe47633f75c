"""What was measured by others at 4 to 256 ranks, and by us at four, beside what the model says of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from octavo_cli.ranks.links import H200
from octavo_cli.ranks.rates import RATES, compute_us
from octavo_cli.ranks.step import Route, exchange_us, step
from octavo_cli.ranks.traffic import Layer, Spread, Wire, reached, row_bytes

Unit = Literal["GB/s", "us", "%"]

DEEPEP = "DeepEP's docs/legacy.md, H800"
DEEPEP_2 = "DeepEP's README, second version, SM90"
UCCL = "UCCL-EP's ep/README.md, H200 and 2 x 200 Gb/s EFA"
MI300X = "UCCL-EP's ep/README.md, MI300X and ConnectX-7"
ISSUE = "DeepEP's issue 493, H200"
OURS = "benchmarks/results/ep-profile-h200-2026-11-22.json, JAX"
STEPS = "benchmarks/results/ep-gather-h200-2026-11-22.json, JAX"
TWO = "Octavo, two H200s of one host"
PEER = "benchmarks/results/ep-torch-*-h200-2026-11-30.json, torch"

PREFILL = Layer(experts=256, features=7168, hidden=2048, tokens=4096, choices=8)
DECODE = replace(PREFILL, tokens=128)

PEER_STEPS: dict[str, tuple[Layer, dict[str, tuple[float, float]]]] = {
    "Qwen3-30B": (Layer(128, 2048, 768, 8192, 8), {"bf16": (129.9, 115.4), "fp8-block": (116.9, 104.8)}),
    "Mixtral": (Layer(8, 4096, 14336, 8192, 2), {"bf16": (106.2, 104.6), "fp8-block": (103.3, 98.6)}),
    "DSv3": (Layer(32, 7168, 2048, 8192, 8), {"bf16": (109.3, 106.6), "fp8-block": (109.0, 100.5)}),
}
"""Layers, and by recipe the time of a step of two H200s by collectives and by peer memory, in percent of that of one
with as many tokens."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure and its prediction.

    calibrates   a constant of the model comes from this row, which therefore checks nothing
    """

    source: str
    what: str
    ranks: int
    unit: Unit
    published: float
    predicted: float
    calibrates: bool = False

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published


def figures() -> Iterator[Figure]:
    """All of them.

    Rates of others are logical ones: what stays on a rank, or in a host, counts as if it had travelled.
    """
    yield from _ours()
    yield from _over_two()
    yield from _throughput(DEEPEP, 138.0, {8: (153, 158), 16: (43, 43), 32: (58, 57), 64: (51, 50)}, (8, 64))
    yield from _latency(DEEPEP, 138.0, _LATENCIES, (64,))
    yield from _throughput(DEEPEP_2, H200.peer, {16: (90, 81), 32: (61, 61)})
    yield from _throughput(MI300X, 228.0, {8: (260, 304), 16: (74, 78), 32: (60, 60), 64: (52, 51)}, (8,))
    yield from _throughput(UCCL, 280.0, {8: (320, 319), 16: (50, 18), 24: (53, 26), 32: (54, 43)}, (8,))
    yield from _throughput(ISSUE, H200.peer, {16: (38.19, 44.37), 32: (13.15, 12.53)})


_LATENCIES: dict[int, tuple[float, float]] = {
    8: (77, 114),
    16: (118, 195),
    32: (155, 273),
    64: (173, 314),
    128: (192, 369),
    256: (194, 360),
}


def _ours() -> Iterator[Figure]:
    for rate in (366.0, 385.0):
        yield Figure(TWO, "pushes, both ways at once", 2, "GB/s", rate, H200.peer, calibrates=True)
    yield Figure(TWO, "NCCL", 2, "GB/s", 283, H200.collective, calibrates=True)
    yield Figure(TWO, "device barrier", 2, "us", 5.3, H200.barrier_us, calibrates=True)
    moved = 58720256 * 3 / 4
    for what, us in (("all-to-all", 166.1), ("all-to-all", 173.6), ("all-gather", 163.7), ("all-gather", 160.9)):
        predicted = exchange_us(moved, 0, 1, "collective", H200)
        yield Figure(OURS, f"{what} of 59 MB", 4, "us", us, predicted, calibrates=True)
    for recipe, received, us in (
        ("bf16", 176357376, 5076.6),
        ("fp8-block", 176357376, 4006.4),
        ("mxfp8", 176357376, 5921.3),
        ("fp8-block", 133693440, 3999.6),
        ("mxfp8", 133693440, 5906.7),
    ):
        codes = "" if received == 176357376 else ", codes"
        computing = compute_us(RATES[recipe], 8192, 8, (PREFILL.features, PREFILL.hidden))
        predicted = computing + exchange_us(received, 0, 4, "collective", H200)
        yield Figure(STEPS, f"step, {recipe}{codes}", 4, "us", us, predicted)


def _over_two() -> Iterator[Figure]:
    """Steps of two H200s with partial sums, in percent of one GPU's at the same clocks."""
    routes: tuple[Route, ...] = ("collective", "peer memory")
    for name, (layer, times) in PEER_STEPS.items():
        for recipe, percents in times.items():
            by_one = step(layer, Spread(1, 8), recipe).total
            for route, measured in zip(routes, percents, strict=True):
                by_two = step(layer, Spread(2, 8), recipe, Wire(returns="sums"), route=route).total
                what = f"step of {name}, {recipe}, {route}"
                yield Figure(PEER, what, 2, "%", measured, 100 * by_two / by_one, calibrates=True)


def _throughput(
    source: str, peer: float, rates: dict[int, tuple[float, float]], calibrates: tuple[int, ...] = ()
) -> Iterator[Figure]:
    """Dispatch of FP8 codes with scales of 1x128, and combine of bf16, with forwarding; logical GB/s.

    peer   GB/s within the source's hosts: seven eighths of a rate of its 8 ranks, or ours where it has no such row
    """
    links = replace(H200, peer=peer)
    for ranks, published in rates.items():
        for what, payload, rate in (("dispatch", "fp8-block", published[0]), ("combine", "bf16", published[1])):
            each = PREFILL.tokens * row_bytes(PREFILL.features, payload)
            hosts = ranks // 8
            counted = each * (reached(PREFILL, hosts) if hosts > 1 else reached(PREFILL, ranks))
            beyond = each * reached(PREFILL, hosts) * (hosts - 1) / hosts
            within = each * reached(PREFILL, ranks) * 7 / 8
            us = exchange_us(within, beyond, 0, "forwarded", links)
            yield Figure(source, what, ranks, "GB/s", rate, counted / us / 1000, ranks in calibrates)


def _latency(
    source: str, peer: float, times: dict[int, tuple[float, float]], calibrates: tuple[int, ...]
) -> Iterator[Figure]:
    """Dispatch and combine of 128 tokens, a copy per choice, without forwarding; microseconds."""
    links = replace(H200, peer=peer, barrier_us=H200.network_us)
    for ranks, published in times.items():
        for what, payload, us in (("dispatch", "fp8-block", published[0]), ("combine", "bf16", published[1])):
            each = DECODE.tokens * DECODE.choices * row_bytes(DECODE.features, payload) / ranks
            predicted = exchange_us(each * 7, each * (ranks - 8), 1, "peer memory", links)
            yield Figure(source, f"{what}, 128 tokens", ranks, "us", us, predicted, ranks in calibrates)
