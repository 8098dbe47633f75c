"""What `octavo bench host` leaves: what Python and the public API cost beside the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.results import goal_dicts, rounded
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times


@dataclass(frozen=True)
class HostRow:
    """Host time of forward and backward of one layer; backends are empty for torch's own."""

    section: ClassVar[str] = "host"

    kind: str
    shape: Shape
    backends: tuple[str, ...]
    times: Times

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """Microseconds, of ours."""
        return {"us of the host": self.times.median} if self.backends else {}

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "groups": self.shape.groups,
            "backends": list(self.backends),
            "host_us": self.times.as_dict(),
            "goals": goal_dicts(goals),
        }


@dataclass(frozen=True, slots=True)
class Graph:
    """A replay in turn with eager calls, others right after one another, and the sum of a replay's kernels in us."""

    replay: Times
    alone: Times
    kernels_us: float


@dataclass(frozen=True)
class ApiRow:
    """Forward and backward of one layer: through `grouped_linear`, as kernels alone, and as a graph (None: no GPU)."""

    section: ClassVar[str] = "layers"

    shape: Shape
    sizes: str
    kind: str
    backends: tuple[str, ...]
    api: Times
    raw: Times
    graph: Graph | None

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """The API over its kernels, a replay over the sum of its own."""
        reached = {"kernels": self.api.median / self.raw.median}
        if self.graph is not None:
            reached["a replay's kernels"] = self.graph.alone.median / self.graph.kernels_us
        return reached

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        graph = self.graph
        return {
            "kind": self.kind,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "sizes": self.sizes,
            "backends": list(self.backends),
            "api_us": self.api.as_dict(),
            "kernels_alone_us": self.raw.as_dict(),
            "replay_us": None if graph is None else graph.replay.as_dict(),
            "replay_alone_us": None if graph is None else graph.alone.as_dict(),
            "kernels_of_replay_us": rounded(None if graph is None else graph.kernels_us, 3),
            "goals": goal_dicts(goals),
        }
