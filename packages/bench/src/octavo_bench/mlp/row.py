"""What `octavo bench mlp` leaves: a row per recipe and way to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.recipes import FRAMEWORK
from octavo_bench.harness.results import goal_dicts
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times

Way = Literal["fused", "in a row"]
FUSED: Way = "fused"
IN_A_ROW: Way = "in a row"
WAYS: tuple[Way, Way] = (IN_A_ROW, FUSED)


@dataclass(frozen=True)
class MlpRow:
    """Forward and backward of the experts (G, K, F, M) with SwiGLU: [2F, K] and [K, F] per expert.

    way        `grouped_mlp`, or the operations in a row
    backends   that serve the two layers; empty for torch's own
    fused      what `grouped_mlp`'s plan says of the operations between the layers
    """

    section: ClassVar[str] = "rows"

    shape: Shape
    sizes: str
    kind: str
    way: Way
    backends: tuple[str, ...]
    fused: str
    times: Times

    @property
    def tflops(self) -> float:
        """The rate of the nine products of [M, K] and [F, K] in this time."""
        return 9 * self.shape.tflops(self.times.median)

    def measures(self, rows: Sequence[MlpRow]) -> dict[str, float]:
        """How many times as fast as the same recipe in a row, where it is fused, and as torch's own bf16."""
        reached = {}
        for row in rows:
            if (row.shape, row.sizes, row.way) != (self.shape, self.sizes, IN_A_ROW):
                continue
            if self.way == FUSED and row.kind == self.kind:
                reached["in a row"] = row.times.ms / self.times.ms
            if row.kind == FRAMEWORK != self.kind:
                reached["torch's bf16"] = row.times.ms / self.times.ms
        return reached

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "way": self.way,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "sizes": self.sizes,
            "backends": list(self.backends),
            "fused": self.fused,
            "us": self.times.as_dict(),
            "ms": round(self.times.ms, 4),
            "goals": goal_dicts(goals),
        }
