"""What `octavo bench tiles` leaves: a sweep per GEMM, with what was measured of each tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times

SAME = 2.0**-7
"""Norm of the difference that another order of summation may leave in a bf16 result, generously."""


@dataclass(frozen=True, slots=True)
class TileTime:
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

    section: ClassVar[str] = "rows"

    shape: Shape
    sizes: str
    case: GemmCase
    tiles: tuple[TileTime, ...]

    @property
    def chosen(self) -> TileTime:
        """The model's choice."""
        return next(tile for tile in self.tiles if tile.chosen)

    @property
    def best(self) -> TileTime:
        """The fastest."""
        return min(self.tiles, key=lambda tile: tile.times.median)

    @property
    def same(self) -> bool:
        """Whether all tiles have one result."""
        return all(tile.same for tile in self.tiles)

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """The chosen tile's rate over the fastest one's."""
        return {"the best tile": self.best.times.median / self.chosen.times.median}

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "case": self.case.label,
            "gemm": self.case.gemm,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "sizes": self.sizes,
            "chosen": self.chosen.name,
            "best": self.best.name,
            "goal": goals[0].as_dict() if goals else None,
            "tiles": [
                {
                    "name": tile.name,
                    "predicted_us": round(tile.predicted_us, 3),
                    "us": tile.times.as_dict(),
                    "tflops": round(self.shape.tflops(tile.times.median), 1),
                    "filled": round(tile.filled, 4),
                    "waves": round(tile.waves, 3),
                    "chosen": tile.chosen,
                    "difference": tile.difference if math.isfinite(tile.difference) else None,
                }
                for tile in self.tiles
            ],
        }
