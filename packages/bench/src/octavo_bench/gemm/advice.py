"""What the measured rows of a shape mean for its user, in a sentence or two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.recipe_base import GEMMS
from octavo_bench.gemm.row import GemmRow, QuantizeTime

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


def step_times(measured: Sequence[Any]) -> dict[str, StepTime]:
    """Steps by kind, for kinds of which all three GEMMs were measured; exact accumulation."""
    quantize = {one.kind: one.times.median for one in measured if isinstance(one, QuantizeTime)}
    gemms: dict[str, dict[str, float]] = {}
    for row in measured:
        if isinstance(row, GemmRow) and not (row.case.fast or row.case.accumulate):
            gemms.setdefault(row.case.kind, {})[row.case.gemm] = row.times.median
    return {
        kind: StepTime(kind, sum(times.values()), quantize.get(kind, 0.0))
        for kind, times in gemms.items()
        if len(times) == len(GEMMS) and (kind == "bf16" or kind in quantize)
    }


def advice(measured: Sequence[Any]) -> Iterator[str]:
    """Which kind is worth its quantization here; nothing without bf16 or without another kind.

    measured   the rows and the quantizers' times of one shape and vector of sizes
    """
    steps = step_times(measured)
    plain = steps.pop("bf16", None)
    if plain is None or not steps:
        return
    first = next(row for row in measured if isinstance(row, GemmRow))
    shape, where = first.shape, f"{first.label}: "
    best = min(steps.values(), key=lambda step: step.total)
    gain = plain.total / best.total
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
    if best.share > _MUCH and shape.groups * shape.n > shape.rows:
        yield (
            f"{where}weights are most of what is quantized; with several microbatches a step, quantize them once "
            "and reuse them."
        )


def unevenness(sizes: Sequence[int]) -> str:
    """How uneven the groups are: the largest one over the mean."""
    mean = sum(sizes) / len(sizes)
    return f"largest group {max(sizes) / mean:.1f}x the mean, {sizes.count(0)} empty"
