"""What `octavo bench host` leaves: what Python and the public API cost beside the kernels, goals, the JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.results import Facts, Failure, failure_dicts, rounded
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times

SIDE = 256
"""K and N of the layers whose host time is taken: their kernels are short."""

HOST_US = 100.0
API_OVER_KERNELS = 1.03
REPLAY_OVER_KERNELS = 1.02


@dataclass(frozen=True, slots=True)
class Graph:
    """A replay in turn with eager calls, others right after one another, and the sum of a replay's kernels in us."""

    replay: Times
    alone: Times
    kernels_us: float


@dataclass(frozen=True)
class HostRow:
    """Host time of forward and backward of one layer [groups, SIDE, SIDE]."""

    kind: str
    groups: int
    backends: tuple[str, ...]
    times: Times
    judged: bool

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Most microseconds, whatever the number of groups."""
        return (Goal(f"{HOST_US:.0f} us", HOST_US, self.times.median, most=True),) if self.judged else ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": self.kind,
            "groups": self.groups,
            "backends": list(self.backends),
            "host_us": rounded(self.times),
            "goals": [goal.as_dict() for goal in self.goals],
        }


@dataclass(frozen=True)
class ApiRow:
    """Forward and backward of one layer: through `grouped_linear`, as kernels alone, and as a graph (None: no GPU)."""

    shape: Shape
    sizes: str
    kind: str
    backends: tuple[str, ...]
    api: Times
    raw: Times
    graph: Graph | None
    judged: bool

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The API against its kernels, a replay against the sum of its own."""
        if not self.judged:
            return ()
        over = Goal(f"{API_OVER_KERNELS} of kernels", API_OVER_KERNELS, self.api.median / self.raw.median, most=True)
        if self.graph is None:
            return (over,)
        replay = self.graph.alone.median / self.graph.kernels_us
        return over, Goal(f"replay {REPLAY_OVER_KERNELS} of its kernels", REPLAY_OVER_KERNELS, replay, most=True)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        graph = self.graph
        return {
            "kind": self.kind,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "sizes": self.sizes,
            "backends": list(self.backends),
            "api_us": rounded(self.api),
            "kernels_alone_us": rounded(self.raw),
            "replay_us": None if graph is None else rounded(graph.replay),
            "replay_alone_us": None if graph is None else rounded(graph.alone),
            "kernels_of_replay_us": None if graph is None else round(graph.kernels_us, 3),
            "goals": [goal.as_dict() for goal in self.goals],
        }


@dataclass(frozen=True, kw_only=True)
class HostResults(Facts):
    """A whole run."""

    host: Sequence[HostRow]
    layers: Sequence[ApiRow]
    notes: Sequence[str]
    failures: Sequence[Failure]

    @property
    def rows(self) -> Sequence[HostRow | ApiRow]:
        """All of both tables."""
        return [*self.host, *self.layers]

    @property
    def judged(self) -> list[bool]:
        """Whether each goal is met."""
        return [goal.passed for row in self.rows for goal in row.goals]

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return self.document(
            judged=self.judged,
            match={},
            framework="torch",
            failures=failure_dicts(self.failures),
            host=[row.as_dict() for row in self.host],
            layers=[row.as_dict() for row in self.layers],
            notes=list(self.notes),
        )
