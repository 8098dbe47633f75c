"""The backends of one request, in order: filtered by card, ranked, bound one after another as they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from octavo.recipe_base import GEMMS
from octavo_registry.contract.bound import Bound
from octavo_registry.contract.cards import Capability
from octavo_registry.contract.plan import Decision
from octavo_registry.contract.request import Request
from octavo_registry.discovery.guard import Fault, guard
from octavo_registry.discovery.records import BackendRecord
from octavo_registry.dispatch.match import match
from octavo_registry.dispatch.preference import REST, Preference
from octavo_registry.dispatch.untried import untried_words


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend whose card admits the request, with the first row that does."""

    record: BackendRecord
    row: Capability

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.record.name

    def with_emulated(self, reason: str, request: Request) -> str:
        """`reason`, and how the row computes products that the device has no instructions for."""
        emulated = self.row.emulated if request.op in GEMMS else None
        return f"{reason}; emulated: {emulated}" if emulated else reason

    def with_untried(self, reason: str) -> str:
        """`reason`, and what the row says where nobody has run it."""
        words = untried_words(self.row, self.name)
        return f"{reason}; {words}" if words else reason


Bind = Callable[[Candidate, Request], Bound | Decision]
"""Binds a candidate, or answers with the verdict ("refused" or "broken") against it."""


def position(preference: Preference | None, name: str) -> int | None:
    """Where a preference puts a backend, lower first; None: it keeps it out."""
    if preference is None:
        return 0
    if name in preference:
        return preference.index(name)
    return preference.index(REST) if REST in preference else None


def filter_cards(
    records: Sequence[BackendRecord], request: Request, preference: Preference | None
) -> tuple[list[Candidate], list[Decision]]:
    """Candidates by preference, priority, fitness and name; and the verdicts on all other backends, broken ones last.

    Of two with one priority a card of graph-safe rows alone comes first where the request is graph-safe, and last
    where it is not: the other one serves eager calls in more ways.
    """
    eligible: list[tuple[tuple[int, int, bool, str], Candidate]] = []
    refused: list[Decision] = []
    broken: list[Decision] = []
    for record in sorted(records, key=lambda r: (-(r.card.priority if r.card else 0), r.name, r.distribution)):
        if record.card is None or record.verdict is not None:
            verdict = record.verdict or "broken"
            (broken if verdict == "broken" else refused).append(record.decision(verdict, record.reason))
            continue
        try:
            row = guard(match, record.card, request)
        except Fault as fault:  # a card that was built around its validation
            broken.append(record.decision("broken", f"its card cannot be read: {fault}"))
            continue
        place = position(preference, record.name)
        if isinstance(row, str):
            refused.append(record.decision("refused", row))
        elif place is None:
            named = ", ".join(preference or ())
            refused.append(
                record.decision("refused", f"the preference is closed and names {named}; name {record.name} or add '*'")
            )
        else:
            unfit = for_graphs(record) != request.graph_safe
            eligible.append(((place, -record.card.priority, unfit, record.name), Candidate(record, row)))
    eligible.sort(key=lambda pair: pair[0])
    return [candidate for _, candidate in eligible], refused + broken


def for_graphs(record: BackendRecord) -> bool:
    """True where every row of the backend's card is graph-safe."""
    return record.card is not None and all(row.graph_safe for row in record.card.capabilities)


class Candidates:
    """Candidates in their final order. `at(i)` is the i-th that binds; nothing is bound before it is asked for."""

    def __init__(self, request: Request, order: Sequence[Candidate], others: Sequence[Decision], bind: Bind) -> None:
        self.request = request
        self._order = tuple(order)
        self._others = tuple(others)
        self._bind = bind
        self._outcomes: list[Bound | Decision] = []

    def at(self, index: int) -> tuple[Candidate, Bound] | None:
        """The `index`-th candidate that binds, or None where there are not so many."""
        while True:
            bound = [(c, o) for c, o in zip(self._order, self._outcomes, strict=False) if isinstance(o, Bound)]
            if index < len(bound):
                return bound[index]
            if len(self._outcomes) == len(self._order):
                return None
            self._outcomes.append(self._bind(self._order[len(self._outcomes)], self.request))

    def decisions(
        self, chosen: int | None = None, passed_over: Mapping[int, str] | None = None
    ) -> tuple[Decision, ...]:
        """A verdict on every backend, in the order in which they were considered.

        chosen       index, as in `at`, of the candidate that serves; None: none does
        passed_over  why candidates that bind do not serve all the same, by index as in `at`
        """
        verdicts: list[Decision] = []
        winner = self.at(chosen) if chosen is not None else None
        bound = 0
        for place, candidate in enumerate(self._order):
            outcome = self._outcomes[place] if place < len(self._outcomes) else None
            if isinstance(outcome, Decision):
                verdicts.append(outcome)
                continue
            index = bound if outcome is not None else -1
            bound += outcome is not None
            if outcome is not None and index == chosen:
                verdicts.append(
                    candidate.record.decision("chosen", candidate.with_untried(self._chosen_reason(candidate)))
                )
            elif outcome is not None and passed_over and index in passed_over:
                verdicts.append(candidate.record.decision("refused", passed_over[index]))
            else:
                after = (
                    f"declares that it serves this; {winner[0].name} comes first"
                    if winner
                    else "declares that it serves this"
                )
                verdicts.append(candidate.record.decision("eligible", candidate.with_untried(after)))
        return (*verdicts, *self._others)

    def _chosen_reason(self, candidate: Candidate) -> str:
        card = candidate.record.card
        if card is None:
            return ""
        reason = f"priority {card.priority}"
        equals = [other for other in self._order if other.record.card and other.record.card.priority == card.priority]
        if len({for_graphs(other.record) for other in equals}) < 2:
            return reason
        if for_graphs(candidate.record) != self.request.graph_safe:
            return reason  # a preference put it there
        what = "made for CUDA graphs" if self.request.graph_safe else "made for eager calls, too"
        return f"{reason}; of equal ones it is {what}"
