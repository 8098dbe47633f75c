"""What `octavo bench step` leaves: a row a step, and its JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.recorded import LABEL, STEP_MS
from octavo_bench.harness.results import Facts, Failure, failure_dicts, rounded
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times

PEER = "framework's bf16"
"""The kind of the framework's own grouped GEMM under its own autograd."""


@dataclass(frozen=True)
class StepRow:
    """Forward and backward of one layer in one framework.

    reuse      weights were quantized once, outside the step
    backends   that serve its operations; empty for the framework's own
    over_torch its time over that of the same step in torch, measured in turns; None where torch ran none
    """

    framework: str
    shape: Shape
    sizes: str
    kind: str
    reuse: bool
    backends: tuple[str, ...]
    times: Times
    goals: tuple[Goal, ...] = ()
    over_torch: float | None = None

    @property
    def ms(self) -> float:
        """Milliseconds."""
        return self.times.median / 1e3

    @property
    def label(self) -> str:
        """The row's name."""
        return f"{self.kind}{', weights reused' if self.reuse else ''}"

    @property
    def tflops(self) -> float:
        """The rate of three GEMMs in this time."""
        return 3 * self.shape.tflops(self.times.median)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "framework": self.framework,
            "kind": self.kind,
            "weights_reused": self.reuse,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "sizes": self.sizes,
            "backends": list(self.backends),
            "us": rounded(self.times),
            "ms": round(self.ms, 4),
            **({} if self.over_torch is None else {"over_torch": round(self.over_torch, 4)}),
            "goals": [goal.as_dict() for goal in self.goals],
        }


def recorded_ms(shape: Shape) -> dict[str, float]:
    """Figures of other libraries at this shape with even groups; empty where there are none."""
    known = STEP_MS.get(shape.key)
    return {} if known is None else known._asdict()


@dataclass(frozen=True, kw_only=True)
class StepResults(Facts):
    """A whole run."""

    frameworks: tuple[str, ...]
    copy_tb_per_s: float | None
    groupings: dict[str, list[int]]
    rows: Sequence[StepRow]
    notes: Sequence[str]
    failures: Sequence[Failure]

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        shapes = dict.fromkeys(row.shape for row in self.rows)
        return self.document(
            judged=[goal.passed for row in self.rows for goal in row.goals],
            match={},
            frameworks=list(self.frameworks),
            copy_tb_per_s=None if self.copy_tb_per_s is None else round(self.copy_tb_per_s, 4),
            groupings=self.groupings,
            failures=failure_dicts(self.failures),
            rows=[row.as_dict() for row in self.rows],
            recorded={
                "label": LABEL,
                "ms": [{"shape": list(shape.key), **recorded_ms(shape)} for shape in shapes if recorded_ms(shape)],
            },
            notes=list(self.notes),
        )


def ratio(row: StepRow, rows: Sequence[StepRow], **other: object) -> float | None:
    """The time of `row` over that of the row that differs from it in these fields alone; None where there is none."""
    wanted = {name: getattr(row, name) for name in ("framework", "shape", "sizes", "kind", "reuse")} | other
    found = (one for one in rows if all(getattr(one, name) == value for name, value in wanted.items()))
    return next((row.ms / one.ms for one in found), None)
