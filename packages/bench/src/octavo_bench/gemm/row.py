"""What `octavo bench gemm` leaves: a row a GEMM, the quantizers' times, the peers, and their JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.results import Facts, Failure, failure_dicts, rounded
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times
from octavo_bench.peers.peer import DENSE, Peer

IN_BOUND = "in bound"


@dataclass(frozen=True)
class GemmRow:
    """One GEMM of one shape and vector of sizes.

    backend  that ran it; times of one call on operands that are quantized already
    match    "in bound" with the largest error over what is allowed, what differs, or why it was not compared
    peers    TFLOP/s of the peers that do this work, by name, the closest first
    goals    empty on a CPU
    """

    case: GemmCase
    shape: Shape
    sizes: str
    backend: str
    times: Times
    match: str
    peers: dict[str, float]
    goals: tuple[Goal, ...] = ()

    @property
    def tflops(self) -> float:
        """The rate."""
        return self.shape.tflops(self.times.median)

    @property
    def ratios(self) -> dict[str, float]:
        """Our rate over each peer's."""
        return {name: self.tflops / rate for name, rate in self.peers.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "case": self.case.label,
            "gemm": self.case.gemm,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "sizes": self.sizes,
            "backend": self.backend,
            "us": rounded(self.times),
            "tflops": round(self.tflops, 1),
            "peer_ratios": {name: round(ratio, 4) for name, ratio in self.ratios.items()},
            "goals": [goal.as_dict() for goal in self.goals],
            "match": self.match,
        }


@dataclass(frozen=True)
class QuantizeTime:
    """x, w and dy of one layer quantized in both directions, one after another."""

    kind: str
    shape: Shape
    sizes: str
    times: Times


@dataclass(frozen=True)
class Table:
    """Everything that was measured of one shape with one vector of sizes.

    notes   why something is missing
    """

    shape: Shape
    sizes: str
    groups: tuple[int, ...]
    rows: tuple[GemmRow, ...]
    quantize: tuple[QuantizeTime, ...]
    peers: tuple[Peer, ...]
    notes: tuple[str, ...]

    @property
    def label(self) -> str:
        """Such as `Mixtral fc1 (8, 4096, 28672, 16384), even`."""
        return f"{self.shape.label}, {self.sizes}"


def peer_rates(peers: Sequence[Peer], case: GemmCase, sizes: str) -> dict[str, float]:
    """TFLOP/s of the peers of a case, the closest first."""
    found = {}
    for name in case.peers:
        for peer in peers:
            fits = (peer.gemm, peer.sizes) in ((case.gemm, sizes), (DENSE, DENSE))
            if peer.name == name and fits and peer.tflops is not None:
                found[name] = peer.tflops
    return found


@dataclass(frozen=True, kw_only=True)
class GemmResults(Facts):
    """A whole run."""

    framework: str
    backend: str | None
    copy_tb_per_s: float | None
    tables: Sequence[Table]
    advice: Sequence[str]
    failures: Sequence[Failure]

    @property
    def rows(self) -> list[GemmRow]:
        """The rows of all tables."""
        return [row for table in self.tables for row in table.rows]

    @property
    def differing(self) -> list[GemmRow]:
        """Rows outside their error bound."""
        return [row for row in self.rows if row.match.startswith("differs")]

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return self.document(
            judged=[goal.passed for row in self.rows for goal in row.goals],
            match={
                "in_bound": sum(row.match.startswith(IN_BOUND) for row in self.rows),
                "differs": len(self.differing),
            },
            framework=self.framework,
            backend=self.backend,
            copy_tb_per_s=None if self.copy_tb_per_s is None else round(self.copy_tb_per_s, 4),
            groupings={table.label: list(table.groups) for table in self.tables},
            failures=failure_dicts(self.failures),
            rows=[row.as_dict() for row in self.rows],
            quantize=[
                {"kind": one.kind, "shape": list(one.shape.key), "sizes": one.sizes, "us": rounded(one.times)}
                for table in self.tables
                for one in table.quantize
            ],
            # a dense peer stands in the tables of all sizes and is one measurement
            peers=[peer.as_dict() for peer in {id(peer): peer for t in self.tables for peer in t.peers}.values()],
            notes=sorted({note for table in self.tables for note in table.notes}),
            advice=list(self.advice),
        )
