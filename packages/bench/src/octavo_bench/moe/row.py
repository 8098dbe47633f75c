"""What `octavo bench moe` leaves: a row a recipe, torch's own in bf16, the goal between them, and its JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo_bench.harness.goals import FP8, Goal
from octavo_bench.harness.results import Facts, Failure, failure_dicts, rounded
from octavo_bench.harness.shapes import EXPERTS, Shape
from octavo_bench.harness.timing import Times

ADDED = "torch's bf16, index_add"
GATHERED = "torch's bf16, gathered and summed"
PEERS = (ADDED, GATHERED)
"""The kinds of torch's own grouped GEMM, by how the rows of a token are put together again."""

OVER_OWN = 1.45
JUDGED = frozenset(shape.key for shape in EXPERTS if shape.name == "DSv3")


@dataclass(frozen=True)
class MoeRow:
    """Forward and backward of a layer with experts (G, K, F, M): routing, permutation, SwiGLU experts, and back.

    choices    of each of the M / choices tokens
    backends   that serve the experts; empty for torch's own
    """

    shape: Shape
    choices: int
    kind: str
    backends: tuple[str, ...]
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
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "choices": self.choices,
            "backends": list(self.backends),
            "us": rounded(self.times),
            "ms": round(self.ms, 4),
            "goals": [goal.as_dict() for goal in self.goals],
        }


def own_ms(row: MoeRow, rows: Sequence[MoeRow]) -> float | None:
    """Milliseconds of torch's faster way at the same shape; None where neither ran."""
    found = (one.ms for one in rows if one.kind in PEERS and (one.shape, one.choices) == (row.shape, row.choices))
    return min(found, default=None)


def moe_goals(row: MoeRow, rows: Sequence[MoeRow]) -> tuple[Goal, ...]:
    """An FP8 recipe at DeepSeek-V3's sizes against torch's faster way in bf16."""
    own = own_ms(row, rows)
    if row.kind not in FP8 or row.shape.key not in JUDGED or own is None:
        return ()
    return (Goal(f"{OVER_OWN} of torch's bf16", OVER_OWN, own / row.ms),)


@dataclass(frozen=True, kw_only=True)
class MoeResults(Facts):
    """A whole run."""

    rows: Sequence[MoeRow]
    notes: Sequence[str]
    failures: Sequence[Failure]

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return self.document(
            judged=[goal.passed for row in self.rows for goal in row.goals],
            match={},
            framework="torch",
            failures=failure_dicts(self.failures),
            rows=[row.as_dict() for row in self.rows],
            notes=list(self.notes),
        )
