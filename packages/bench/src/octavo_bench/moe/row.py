"""What `octavo bench moe` leaves: a row per recipe, and torch's own in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.results import goal_dicts
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times

ADDED = "torch's bf16, index_add"
GATHERED = "torch's bf16, gathered and summed"
PEERS = (ADDED, GATHERED)
"""The kinds of torch's own grouped GEMM, by how the rows of a token are put together again."""


@dataclass(frozen=True)
class MoeRow:
    """Forward and backward of a layer with experts (G, K, F, M): routing, permutation, SwiGLU experts, and back.

    choices    of each of the M / choices tokens
    backends   that serve the experts; empty for torch's own
    """

    section: ClassVar[str] = "rows"

    shape: Shape
    choices: int
    kind: str
    backends: tuple[str, ...]
    times: Times

    @property
    def tflops(self) -> float:
        """The rate of the nine products of [M, K] and [F, K] in this time."""
        return 9 * self.shape.tflops(self.times.median)

    def measures(self, rows: Sequence[MoeRow]) -> dict[str, float]:
        """How many times as fast as torch's faster way at the same shape."""
        own = [row for row in rows if row.kind in PEERS and (row.shape, row.choices) == (self.shape, self.choices)]
        if self.kind in PEERS or not own:
            return {}
        return {"torch's bf16": min(row.times.ms for row in own) / self.times.ms}

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "choices": self.choices,
            "backends": list(self.backends),
            "us": self.times.as_dict(),
            "ms": round(self.times.ms, 4),
            "goals": goal_dicts(goals),
        }
