"""What the registry answers: a verdict on every backend, and the plan of the one that serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal

from typing_extensions import TypeVar  # of typing from Python 3.13 on

from octavo_registry.contract.arrays import Prepare
from octavo_registry.contract.bound import Bound
from octavo_registry.contract.cards import Capability
from octavo_registry.contract.request import Request, describe_request

Verdict = Literal["chosen", "eligible", "refused", "broken"]

Request_co = TypeVar("Request_co", bound=Request, covariant=True, default=Request)
Bound_co = TypeVar("Bound_co", bound=Bound[Any], covariant=True, default=Bound[Any])


@dataclass(frozen=True, slots=True)
class Decision:
    """One backend's verdict on a request."""

    backend: str
    distribution: str
    version: str
    verdict: Verdict
    reason: str


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Rows in aligned columns; the last column is left as long as it is."""
    cells = [tuple(row) for row in rows]
    if not cells:
        return ""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]) - 1)]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append((indent + "  ".join([*padded, row[-1]])).rstrip())
    return "\n".join(lines)


def decision_table(decisions: Iterable[Decision]) -> str:
    """One line per backend: name, verdict, reason."""
    return table((d.backend, d.verdict, d.reason) for d in decisions)


@dataclass(frozen=True, slots=True)
class Plan(Generic[Request_co, Bound_co]):
    """A request bound to the backend that serves it. `bound.run` is the hot path; nothing else here is. Printable.

    bound       the backend's answer, of the class of the request's operation
    note        the Bound's, or what the card says of an emulated recipe
    decisions   the verdict on every backend, in the order in which they were considered
    capability  the row of the backend's card that admitted the request: how it accumulates, what it emulates
    """

    request: Request_co
    backend: str
    bound: Bound_co
    note: str
    decisions: tuple[Decision, ...]
    capability: Capability

    @property
    def run(self) -> Any:
        """`bound.run`, for callers who do not know the operation."""
        return self.bound.run

    @property
    def layouts(self) -> Mapping[str, str]:
        """`bound.layouts`."""
        return self.bound.layouts

    @property
    def prepare(self) -> Prepare[Any] | None:
        """`bound.prepare`."""
        return self.bound.prepare

    def __str__(self) -> str:
        lines = [f"{describe_request(self.request)}: {self.backend}"]
        if self.note:
            lines[0] += f" ({self.note})"
        layouts = ", ".join(f"{operand} {layout}" for operand, layout in sorted(self.layouts.items()))
        if layouts:
            lines.append(f"  layouts: {layouts}")
        lines.append(decision_table(self.decisions))
        return "\n".join(lines)
