"""Rows of a benchmark as they are made: one that fails is kept, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from octavo import NoBackendError
from octavo_bench.errors import RunError
from octavo_bench.harness.results import Failure, told
from octavo_bench.harness.shapes import Shape

Row = TypeVar("Row")


@dataclass(slots=True)
class Attempts(Generic[Row]):
    """Rows that were made, why some were not, and what failed."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def add(self, make: Callable[[], Row], shape: Shape, sizes: str, kind: str, what: str, peer: str | None) -> None:
        """A row of `kind`, or what became of it: what nothing serves and peers that fail are notes.

        what   names the case beside its kind in a failure
        peer   names what is timed where that is a peer, else None
        """
        try:
            self.rows.append(make())
        except NoBackendError as error:
            self.notes.append(f"{kind}: {' '.join(str(error).split())[:300]}")
        except Exception as error:  # the others are worth having; the command fails at its end
            if peer is not None:
                self.notes.append(f"{peer}: {told(error)[:160]}")
            else:
                self.failures.append(Failure(f"{kind}, {what}", shape.key, sizes, told(error)))

    def told_once(self) -> list[str]:
        """The notes, each once."""
        return list(dict.fromkeys(self.notes))


class Layers(Protocol):
    """Results of layers: their rows have `backends`, none for a peer's."""

    @property
    def rows(self) -> Sequence[Any]:
        """Each row's `backends` serve it."""

    @property
    def failures(self) -> Sequence[Failure]:
        """What went wrong."""


def check_layers(results: Layers, what: str) -> None:
    """RunError where one of these `what` failed, or no backend served any."""
    if results.failures:
        raise RunError(f"{len(results.failures)} {what} failed; the lines with FAILED say which")
    if not any(row.backends for row in results.rows):
        raise RunError("no backend serves any of these layers; the notes say why, and so does `octavo why layer`")
