"""The curve of the model of experts over ranks: a step of DeepSeek-V3's MoE layer from 1 to 512 ranks."""

from __future__ import annotations

import lines

from octavo_cli.ranks.step import Route, step
from octavo_cli.ranks.traffic import Layer, Spread, Wire

LAYER = Layer(experts=256, features=7168, hidden=2048, tokens=8192, choices=8)
RANKS = [2**power for power in range(10)]
PER_HOST, SKEW = 8, 1.25
CODES = Wire("fp8-block", "sums")


def _curve(wire: Wire, route: Route) -> list[float]:
    """Milliseconds of the step; beyond one rank per expert there are replicas of as many ranks."""
    spreads = [Spread(min(ranks, LAYER.experts), PER_HOST) for ranks in RANKS]
    return [step(LAYER, each, "fp8-block", wire, route=route, skew=SKEW).total / 1000 for each in spreads]


def _overlapped() -> list[float]:
    within, beyond = _curve(CODES, "peer memory"), _curve(CODES, "forwarded")
    return [within[at] if ranks <= PER_HOST else beyond[at] for at, ranks in enumerate(RANKS)]


def draw() -> str:
    """The SVG file."""
    spreads = [Spread(min(ranks, LAYER.experts), PER_HOST) for ranks in RANKS]
    computing = [step(LAYER, each, "fp8-block", skew=SKEW).compute / 1000 for each in spreads]
    return lines.draw(
        lines.Lines(
            "DeepSeek-V3's MoE layer over ranks: forward and backward, by the model",
            "Block FP8, 8192 tokens per rank, 8 ranks per host, skew 1.25. octavo_cli.ranks, not measured.",
            RANKS,
            {
                "tokens and rows, bf16": ("torch", _curve(Wire(), "collective")),
                "codes and sums": ("jax", _curve(CODES, "collective")),
                "the same, overlapped": ("native", _overlapped()),
                "computing alone": ("tool", computing),
            },
            20,
            ("ranks", "ms"),
        )
    )
