"""A peer's time at one GEMM, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.results import rounded
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times

DENSE = "dense"
"""The sizes of a peer that has equal groups or none, and the gemm of one without groups."""

BATCHED = ", batched"
"""What follows a dense peer's name where it has a weight matrix for each group."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's time, or the reason why it has none.

    sizes   of the groups, or "dense": the same figure then stands beside every vector of sizes
    gemm    "dense" for one product [M, K] x [K, N], which stands beside all three GEMMs
    """

    section: ClassVar[str] = "peers"

    name: str
    shape: Shape
    sizes: str
    gemm: str
    times: Times | None = None
    note: str = ""

    @property
    def tflops(self) -> float | None:
        """Its rate."""
        return None if self.times is None else self.shape.tflops(self.times.median)

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """Nothing: a peer has no goals."""
        return {}

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "peer": self.name,
            "shape": list(self.shape.key),
            "sizes": self.sizes,
            "gemm": self.gemm,
            "us": None if self.times is None else round(self.times.median, 3),
            "tflops": rounded(self.tflops, 1),
            "note": self.note,
        }


def peers_of(case: GemmCase) -> tuple[str, ...]:
    """Names of the peers that do this work, or work like it, the closest first."""
    if case.family in ("bf16", "mxfp8", "nvfp4"):
        return ("grouped_mm", f"dense bf16{BATCHED}", "dense bf16", "ragged_dot")
    how = "fast" if case.fast else "exact"
    dense = f"dense fp8 {how}"
    return (f"scaled_grouped_mm {how}", f"{dense}{BATCHED}", dense, "grouped_mm", "ragged_dot")


def peer_rates(peers: Sequence[Peer], case: GemmCase, sizes: str) -> dict[str, float]:
    """TFLOP/s of the peers of a case, the closest first."""
    rates = {}
    for name in peers_of(case):
        for peer in peers:
            fits = peer.gemm in (case.gemm, DENSE) and peer.sizes in (sizes, DENSE)
            if peer.name == name and fits and peer.tflops is not None:
                rates[name] = peer.tflops
    return rates
