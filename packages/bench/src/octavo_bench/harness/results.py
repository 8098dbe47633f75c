"""The results of a run: rows with the goals they reached, failures, and the JSON form that all benchmarks share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from octavo_bench.harness.goals import Goal
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times
from octavo_registry.cli.files import write_whole

SCHEMA_VERSION = 1


class Row(Protocol):
    """One measurement.

    section   the list of the result file that it stands in
    """

    section: ClassVar[str]

    @property
    def shape(self) -> Shape | None:
        """The shape of the layer; None where what is measured is not a layer."""

    def measures(self, rows: Sequence[Any]) -> Mapping[str, float]:
        """What the row reached, under the names that goals and columns use; `rows` are all rows of the run."""

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON; goals choose rows by these fields."""


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class Judged(Generic[R]):
    """A row, its named measures (over other rows of the run, too), and the goals that it is held to."""

    row: R
    measures: Mapping[str, float]
    goals: tuple[Goal, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that could not be run, and the error's text."""

    case: str
    shape: tuple[int, ...]
    grouping: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What every result file says of its run: a row has `repeats` timed calls at most."""

    command: str
    device: str
    framework: str
    dtype: str
    seed: int
    repeats: int
    machine: dict[str, Any]
    seconds: float
    versions: dict[str, str | None]


@dataclass(frozen=True, kw_only=True)
class Results:
    """A whole run of one benchmark.

    sections   the names of the lists of rows in its file, empty ones too
    match      how many rows had each outcome when they were compared with the definition
    parts      what its file has that other benchmarks' files do not have
    recorded   figures of other libraries by shape ("G,K,N,M"); recorded_as is what they are, and their unit
    judged     whether goals were given
    """

    facts: Facts
    rows: Sequence[Judged[Any]]
    sections: tuple[str, ...] = ("rows",)
    match: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    failures: Sequence[Failure] = ()
    recorded: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    recorded_as: tuple[str, str] = ("", "")
    judged: bool = False

    @property
    def goals(self) -> list[Goal]:
        """The goals of all rows."""
        return [goal for row in self.rows for goal in row.goals]

    def of(self, kind: type[R]) -> list[Judged[R]]:
        """The rows of one kind."""
        return [row for row in self.rows if isinstance(row.row, kind)]

    def recorded_at(self, shape: Shape) -> Mapping[str, float]:
        """Figures of other libraries at this shape; empty where there are none."""
        return self.recorded.get(shape.text, {})

    def document(self) -> dict[str, Any]:
        """The content of the result file."""
        facts = asdict(self.facts)
        seconds = facts.pop("seconds")
        sections: dict[str, list[Any]] = {section: [] for section in self.sections}
        for judged in self.rows:
            sections[judged.row.section].append(judged.row.as_dict(judged.goals))
        return {
            "schema_version": SCHEMA_VERSION,
            "date": datetime.now(UTC).date().isoformat(),
            **facts,
            "goals": {"reached": sum(goal.passed for goal in self.goals), "of": len(self.goals)},
            "match": dict(self.match),
            **self.parts,
            **self._recorded(),
            "failures": [{**asdict(failure), "shape": list(failure.shape)} for failure in self.failures],
            **sections,
            "notes": list(self.notes),
            "seconds": round(seconds, 1),
        }

    def _recorded(self) -> dict[str, Any]:
        """The recorded figures of the shapes that were measured, as a part of the document."""
        label, unit = self.recorded_as
        shapes = [shape for shape in dict.fromkeys(judged.row.shape for judged in self.rows) if shape is not None]
        known = [{"shape": list(shape.key), **self.recorded_at(shape)} for shape in shapes if self.recorded_at(shape)]
        return {"recorded": {"label": label, unit: known}} if self.recorded else {}


class LayerRow(Protocol):
    """What the rows of all benchmarks of whole layers have."""

    @property
    def kind(self) -> str:
        """The kind of recipe, or the name of a peer."""

    @property
    def shape(self) -> Shape:
        """The shape of the layer or its experts."""

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that serve it; none for a peer."""

    @property
    def times(self) -> Times:
        """The times of forward and backward together."""


def layer_dict(row: LayerRow, goals: Sequence[Goal], **own: Any) -> dict[str, Any]:
    """A layer's row as plain values for JSON, with fields of its `own`."""
    return {
        "kind": row.kind,
        **own,
        "shape": list(row.shape.key),
        "name": row.shape.name,
        "backends": list(row.backends),
        "us": row.times.as_dict(),
        "ms": round(row.times.ms, 4),
        "goals": goal_dicts(goals),
    }


def goal_dicts(goals: Sequence[Goal]) -> list[dict[str, Any]]:
    """Goals as plain values for JSON."""
    return [goal.as_dict() for goal in goals]


def rounded(value: float | None, digits: int = 4) -> float | None:
    """A number for JSON; None stays None."""
    return None if value is None else round(value, digits)


def in_one_line(error: Exception) -> str:
    """An error's type and text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def write_json(results: Results, path: Path) -> None:
    """The results in `path`, whole or not at all."""
    write_whole(path, json.dumps(results.document(), indent=1, allow_nan=False) + "\n")
