"""What the measured rows of a shape mean for its user, in a sentence or two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.recipe_base import GEMMS
from octavo_bench.gemm.row import Table

_EVEN_OUT = 1.05  # below this a recipe is not faster but the same
_MUCH = 0.10


@dataclass(frozen=True, slots=True)
class StepTime:
    """Three GEMMs and the quantizers of one kind, microseconds."""

    kind: str
    gemms: float
    quantize: float

    @property
    def total(self) -> float:
        """Of a forward and a backward pass."""
        return self.gemms + self.quantize

    @property
    def share(self) -> float:
        """Of the quantizers."""
        return self.quantize / self.total


def step_times(table: Table) -> dict[str, StepTime]:
    """Steps by kind, for kinds of which all three GEMMs were measured; exact accumulation."""
    quantize = {one.kind: one.times.median for one in table.quantize}
    gemms: dict[str, dict[str, float]] = {}
    for row in table.rows:
        if not (row.case.fast or row.case.accumulate):
            gemms.setdefault(row.case.kind, {})[row.case.gemm] = row.times.median
    return {
        kind: StepTime(kind, sum(times.values()), quantize.get(kind, 0.0))
        for kind, times in gemms.items()
        if len(times) == len(GEMMS) and (kind == "bf16" or kind in quantize)
    }


def advice(table: Table) -> Iterator[str]:
    """Which kind is worth its quantization here; nothing without bf16 or without another kind."""
    steps = step_times(table)
    plain = steps.pop("bf16", None)
    if plain is None or not steps:
        return
    best = min(steps.values(), key=lambda step: step.total)
    gain = plain.total / best.total
    where = f"{table.label}: "
    if gain < 1 / _EVEN_OUT:
        yield (
            f"{where}bf16 is the fastest here; a step in {best.kind}, the next, takes {1 / gain:.2f}x its time, "
            f"{best.share:.0%} of it quantization."
        )
    elif gain < _EVEN_OUT:
        yield (
            f"{where}a step in {best.kind} takes as long as in bf16 ({best.total / 1e3:.3g} ms); take it for memory, "
            "not for time."
        )
    else:
        yield (
            f"{where}a step in {best.kind} is {gain:.2f}x faster than in bf16 ({best.total / 1e3:.3g} against "
            f"{plain.total / 1e3:.3g} ms); quantization is {best.share:.0%} of it."
        )
    others = [step for step in sorted(steps.values(), key=lambda step: step.total) if step is not best]
    if others:
        listed = ", ".join(f"{step.kind} {plain.total / step.total:.2f}x" for step in others)
        yield f"{where}the others against bf16: {listed}."
    if best.share > _MUCH and table.shape.groups * table.shape.n * table.shape.k > table.shape.rows * table.shape.k:
        yield (
            f"{where}weights are most of what is quantized; with several microbatches a step, quantize them once "
            "and reuse them."
        )


def wasted_rows(table: Table) -> str:
    """How uneven the groups are: the largest one over the mean."""
    filled = [size for size in table.groups if size]
    mean = sum(table.groups) / len(table.groups)
    empty = len(table.groups) - len(filled)
    return f"largest group {max(filled, default=0) / mean:.1f}x the mean, {empty} empty"
