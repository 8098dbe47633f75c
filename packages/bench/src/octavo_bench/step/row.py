"""What `octavo bench step` leaves: a row per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.recipes import FRAMEWORK
from octavo_bench.harness.results import goal_dicts
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times


@dataclass(frozen=True)
class StepRow:
    """Forward and backward of one layer in one framework.

    reuse        weights were quantized once, outside the step
    backends     that serve its operations; empty for the framework's own
    over_torch   its time over that of the same step in torch, measured in turns; None where torch ran none
    quantize_ms  that its quantizers' bytes take at the copy rate; None where that is not known
    """

    section: ClassVar[str] = "rows"

    framework: str
    shape: Shape
    sizes: str
    kind: str
    reuse: bool
    backends: tuple[str, ...]
    times: Times
    over_torch: float | None = None
    quantize_ms: float | None = None

    @property
    def label(self) -> str:
        """The row's name."""
        return f"{self.kind}{', weights reused' if self.reuse else ''}"

    @property
    def tflops(self) -> float:
        """The rate of three GEMMs in this time."""
        return 3 * self.shape.tflops(self.times.median)

    def measures(self, rows: Sequence[StepRow]) -> dict[str, float]:
        """Its time, over other rows' and over the least that an emulated recipe can take; gains over bf16."""
        reached = {}
        for name, other in (("framework's bf16 / it", FRAMEWORK), ("bf16 / it", "bf16")):
            over = self._over(rows, kind=other, reuse=False)
            if over is not None:
                reached[name] = 1 / over
        if not self.backends:
            return reached
        reached["ms"] = self.times.ms
        if self.over_torch is not None:
            reached["torch"] = self.over_torch
        over_even = self._over(rows, sizes="even")
        if over_even is not None and self.sizes != "even":
            reached["even"] = over_even
        if "bf16 / it" in reached and self.quantize_ms is not None:
            reached["bf16 + bytes"] = self.times.ms / (self.times.ms * reached["bf16 / it"] + self.quantize_ms)
        return reached

    def _over(self, rows: Sequence[StepRow], **other: object) -> float | None:
        """Its time over that of the row that differs from it in these fields alone; None where there is none."""
        alike = {name: getattr(self, name) for name in ("framework", "shape", "sizes", "kind", "reuse")} | other
        found = (row for row in rows if all(getattr(row, name) == value for name, value in alike.items()))
        return next((self.times.ms / row.times.ms for row in found), None)

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "framework": self.framework,
            "kind": self.kind,
            "weights_reused": self.reuse,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "sizes": self.sizes,
            "backends": list(self.backends),
            "us": self.times.as_dict(),
            "ms": round(self.times.ms, 4),
            **({} if self.over_torch is None else {"over_torch": round(self.over_torch, 4)}),
            "goals": goal_dicts(goals),
        }
