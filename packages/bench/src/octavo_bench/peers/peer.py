"""A peer's time at one GEMM, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.results import rounded
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times

DENSE = "dense"
"""The sizes of a peer that has equal groups or none, and the gemm of one without groups."""

BATCHED = ", batched"
"""What follows a dense peer's name where it has a weight matrix for each group."""


ACCUMULATED = " += fp32"
"""What follows the name of a peer whose wgrad is added to an fp32 accumulator, as it follows a case's."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer's time by itself, or the reason why it has none.

    sizes   of the groups, or "dense": the same figure then stands beside every vector of sizes
    gemm    "dense" for one product [M, K] x [K, N], which stands beside all three GEMMs
    match   how far sampled outputs are from float64 products of the operands in bf16; "" where none were taken
    """

    section: ClassVar[str] = "peers"

    name: str
    shape: Shape
    sizes: str
    gemm: str
    times: Times | None = None
    note: str = ""
    match: str = ""

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
            "match": self.match,
            "note": self.note,
        }


def peers_of(case: GemmCase) -> tuple[str, ...]:
    """Names of the peers that do this work, or work like it, the closest first."""
    own = {"bf16": "DeepGEMM bf16", "block": "DeepGEMM fp8"}.get(case.family)
    closest = () if own is None else (f"{own}{ACCUMULATED if case.accumulate else ''}",)
    if case.family in ("bf16", "mxfp8", "nvfp4"):
        return (*closest, "grouped_mm", f"dense bf16{BATCHED}", "dense bf16", "ragged_dot")
    how = "fast" if case.fast else "exact"
    dense = f"dense fp8 {how}"
    return (*closest, f"scaled_grouped_mm {how}", f"{dense}{BATCHED}", dense, "grouped_mm", "ragged_dot")


class Named(Protocol):
    """What stands beside GEMMs: a peer, or a candidate for one."""

    @property
    def name(self) -> str:
        """See `Peer`."""

    @property
    def sizes(self) -> str:
        """See `Peer`."""

    @property
    def gemm(self) -> str:
        """See `Peer`."""


P = TypeVar("P", bound=Named)


def beside(peers: Iterable[P], case: GemmCase, sizes: str) -> dict[str, P]:
    """Those of a case with groups of these sizes, by name, the closest first."""
    fitting = {one.name: one for one in peers if one.gemm in (case.gemm, DENSE) and one.sizes in (sizes, DENSE)}
    return {name: fitting[name] for name in peers_of(case) if name in fitting}
