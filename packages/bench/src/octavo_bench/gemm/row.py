"""What `octavo bench gemm` leaves: a row per GEMM, and the quantizers' times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.results import goal_dicts
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times

IN_BOUND = "in bound"
DIFFERS = "differs"


@dataclass(frozen=True)
class GemmRow:
    """One GEMM of one shape and vector of sizes.

    backend   that ran it; times of one call on operands that are quantized already
    match     "in bound" with the largest error over what is allowed, what differs, or why it was not compared
    peers     TFLOP/s of the peers that do this work, by name, the closest first; in turns with `times`
    limit_us  that a wgrad in FP8 cannot go below (`wgrad_limit_us`); None for others and where it is not known
    """

    section: ClassVar[str] = "rows"

    case: GemmCase
    shape: Shape
    sizes: str
    backend: str
    times: Times
    match: str
    peers: Mapping[str, float]
    limit_us: float | None = None

    @property
    def tflops(self) -> float:
        """The rate."""
        return self.shape.tflops(self.times.median)

    @property
    def label(self) -> str:
        """Of the table that it stands in, such as `Mixtral fc1 (8, 4096, 28672, 16384), even`."""
        return f"{self.shape.label}, {self.sizes}"

    @property
    def ratios(self) -> dict[str, float]:
        """Our rate over each peer's."""
        return {name: self.tflops / rate for name, rate in self.peers.items()}

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """Its rate over the peers' and over the same with even groups, its share of the limit, and its figures."""
        reached = {**self.ratios, "TFLOP/s": self.tflops, "us": self.times.median}
        if self.limit_us is not None:
            reached["memory's or tensor cores' limit"] = self.limit_us / self.times.median
        for row in rows:
            if (
                isinstance(row, GemmRow)
                and (row.case, row.shape) == (self.case, self.shape)
                and row.sizes == "even" != self.sizes
            ):
                reached["even"] = self.tflops / row.tflops
        return reached

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "case": self.case.label,
            "gemm": self.case.gemm,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "sizes": self.sizes,
            "backend": self.backend,
            "us": self.times.as_dict(),
            "tflops": round(self.tflops, 1),
            "peer_ratios": {name: round(ratio, 4) for name, ratio in self.ratios.items()},
            "goals": goal_dicts(goals),
            "match": self.match,
        }


@dataclass(frozen=True)
class QuantizeTime:
    """x, w and dy of one layer quantized in both directions, one after another."""

    section: ClassVar[str] = "quantize"

    kind: str
    shape: Shape
    sizes: str
    times: Times

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """Nothing that goals are for."""
        return {}

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "shape": list(self.shape.key),
            "sizes": self.sizes,
            "us": self.times.as_dict(),
        }


def moved_bytes(case: GemmCase, shape: Shape) -> float:
    """What a GEMM cannot move less of: both operands once, its result, and an accumulator as well; scales left out."""
    width = {"bf16": 2.0, "nvfp4": 0.5}.get(case.family, 1.0)
    x, w, y = shape.rows * shape.k, shape.groups * shape.n * shape.k, shape.rows * shape.n
    if case.gemm == "wgrad":
        return width * (x + y) + (8 if case.accumulate else 2) * w
    left, result = (x, y) if case.gemm == "fprop" else (y, x)
    return width * (left + w) + 2 * result


def wgrad_limit_us(
    case: GemmCase, shape: Shape, copy_tb_per_s: float | None, peers: Mapping[str, float]
) -> float | None:
    """The time that an FP8 wgrad cannot go below: its bytes at the copy rate, or its products at the dense rate.

    Codes are read, results written, and what accumulates in fp32 is read as well. None for other GEMMs, and where a
    rate is missing.
    """
    dense = peers.get(f"dense fp8 {'fast' if case.fast else 'exact'}")
    if case.gemm != "wgrad" or copy_tb_per_s is None or dense is None:
        return None
    return max(moved_bytes(case, shape) / copy_tb_per_s / 1e6, shape.flops / dense / 1e6)
