"""What `octavo bench mlp` leaves: a row a recipe and way to run it, its goal, and its JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.results import Facts, Failure, failure_dicts, rounded
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times

Way = Literal["fused", "in a row"]
FUSED: Way = "fused"
IN_A_ROW: Way = "in a row"
WAYS: tuple[Way, Way] = (IN_A_ROW, FUSED)

OVER_IN_A_ROW = 1.15


@dataclass(frozen=True)
class MlpRow:
    """Forward and backward of the experts (G, K, F, M) with SwiGLU: [2F, K] and [K, F] an expert.

    way        `grouped_mlp`, or the operations in a row
    backends   that serve the two layers; empty for torch's own
    fused      what `grouped_mlp`'s plan says of the operations between the layers
    """

    shape: Shape
    sizes: str
    kind: str
    way: Way
    backends: tuple[str, ...]
    fused: str
    times: Times
    goals: tuple[Goal, ...] = ()

    @property
    def ms(self) -> float:
        """Milliseconds."""
        return self.times.median / 1e3

    @property
    def tflops(self) -> float:
        """The rate of the nine products of [M, K] and [F, K] in this time."""
        return 9 * self.shape.tflops(self.times.median)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "way": self.way,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "sizes": self.sizes,
            "backends": list(self.backends),
            "fused": self.fused,
            "us": rounded(self.times),
            "ms": round(self.ms, 4),
            "goals": [goal.as_dict() for goal in self.goals],
        }


def beside(row: MlpRow, rows: Sequence[MlpRow], kind: str, way: Way) -> float | None:
    """Milliseconds of another row of the same shape and sizes; None where there is none."""
    found = (one for one in rows if (one.shape, one.sizes, one.kind, one.way) == (row.shape, row.sizes, kind, way))
    return next((one.ms for one in found), None)


def mlp_goals(row: MlpRow, rows: Sequence[MlpRow]) -> tuple[Goal, ...]:
    """A quantized recipe, fused, against the same operations in a row."""
    plain = beside(row, rows, row.kind, IN_A_ROW)
    if row.way != FUSED or row.kind == "bf16" or plain is None:
        return ()
    return (Goal(f"{OVER_IN_A_ROW} of in a row", OVER_IN_A_ROW, plain / row.ms),)


@dataclass(frozen=True, kw_only=True)
class MlpResults(Facts):
    """A whole run."""

    probs: bool
    groupings: dict[str, list[int]]
    rows: Sequence[MlpRow]
    notes: Sequence[str]
    failures: Sequence[Failure]

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return self.document(
            judged=[goal.passed for row in self.rows for goal in row.goals],
            match={},
            framework="torch",
            probs=self.probs,
            groupings=self.groupings,
            failures=failure_dicts(self.failures),
            rows=[row.as_dict() for row in self.rows],
            notes=list(self.notes),
        )
