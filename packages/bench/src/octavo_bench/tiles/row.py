"""What `octavo bench tiles` leaves: a sweep a GEMM with a row a tile, and its JSON form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.results import Facts, Failure, failure_dicts, rounded
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times

OF_BEST = 0.97
SAME = 2.0**-7
"""Norm of the difference that another order of summation may leave in a bf16 result, generously."""


@dataclass(frozen=True, slots=True)
class TileRow:
    """One tile: what the model expects, what was measured, and how far its result is from the chosen tile's."""

    name: str
    predicted_us: float
    filled: float
    waves: float
    chosen: bool
    times: Times
    difference: float

    @property
    def same(self) -> bool:
        """Whether its result is the chosen one's."""
        return self.difference <= SAME


@dataclass(frozen=True)
class Sweep:
    """Every tile of one GEMM on one shape and vector of sizes, the chosen one first."""

    shape: Shape
    sizes: str
    case: GemmCase
    tiles: tuple[TileRow, ...]

    @property
    def chosen(self) -> TileRow:
        """The model's choice."""
        return next(tile for tile in self.tiles if tile.chosen)

    @property
    def best(self) -> TileRow:
        """The fastest."""
        return min(self.tiles, key=lambda tile: tile.times.median)

    @property
    def goal(self) -> Goal:
        """The chosen tile's rate over the fastest one's."""
        return Goal(f"{OF_BEST} of the best tile", OF_BEST, self.best.times.median / self.chosen.times.median)

    @property
    def same(self) -> bool:
        """Whether all tiles have one result."""
        return all(tile.same for tile in self.tiles)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "case": self.case.label,
            "gemm": self.case.gemm,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "sizes": self.sizes,
            "chosen": self.chosen.name,
            "best": self.best.name,
            "goal": self.goal.as_dict(),
            "tiles": [
                {
                    "name": tile.name,
                    "predicted_us": round(tile.predicted_us, 3),
                    "us": rounded(tile.times),
                    "tflops": round(self.shape.tflops(tile.times.median), 1),
                    "filled": round(tile.filled, 4),
                    "waves": round(tile.waves, 3),
                    "chosen": tile.chosen,
                    "difference": tile.difference if math.isfinite(tile.difference) else None,
                }
                for tile in self.tiles
            ],
        }


@dataclass(frozen=True, kw_only=True)
class TilesResults(Facts):
    """A whole run."""

    groupings: dict[str, list[int]]
    sweeps: Sequence[Sweep]
    failures: Sequence[Failure]

    @property
    def judged(self) -> list[bool]:
        """Whether each choice is good enough; on a CPU, which has no tiles, nothing is judged."""
        return [sweep.goal.passed for sweep in self.sweeps] if self.device == "cuda" else []

    @property
    def differing(self) -> list[Sweep]:
        """Sweeps with a tile whose result is another."""
        return [sweep for sweep in self.sweeps if not sweep.same]

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return self.document(
            judged=self.judged,
            match={"same": len(self.sweeps) - len(self.differing), "differs": len(self.differing)},
            groupings=self.groupings,
            failures=failure_dicts(self.failures),
            rows=[sweep.as_dict() for sweep in self.sweeps],
        )
