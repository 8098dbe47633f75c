"""The backends of one request: filtered by their cards, put in order, and bound one by one, no more than are needed."""

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
from octavo_registry.dispatch.preference import REST, Preference, shown
from octavo_registry.dispatch.untried import untried_words

SERVES = "declares that it serves this"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend whose card admits the request, with the first row that does.

    place   its position in the preference, lower first
    named   whether the preference names it; False without a preference
    unfit   whether its card is for graph-safe requests alone and this one is not graph-safe, or vice versa
    """

    record: BackendRecord
    row: Capability
    place: int
    named: bool
    unfit: bool

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.record.name

    @property
    def priority(self) -> int:
        """The priority on its card."""
        return self.record.card.priority if self.record.card else 0

    @property
    def rank(self) -> tuple[int, int, bool, str]:
        """The key by which candidates are sorted, unless a plugin ranks them."""
        return self.place, -self.priority, self.unfit, self.name

    def chosen_over(self, later: Sequence[Candidate], request: Request) -> str:
        """Why this candidate serves the request, and not one of the `later` ones."""
        overtaken = next((other for other in later if other.rank < self.rank), None)
        if overtaken is not None:
            return f"a plugin's octavo_rank puts it before {overtaken.name}"
        following = later[0] if later else None
        if self.named:
            return f"asked for before {following.name}" if following and following.named else "asked for by name"
        if following is None:
            return "the only one that serves this"
        if self.priority != following.priority:
            return f"ranks above {following.name} by priority, {self.priority} over {following.priority}"
        alike = f"has the priority of {following.name}, {self.priority},"
        if self.unfit != following.unfit:
            made = "made for CUDA graphs" if request.graph_safe else "made for eager calls, too"
            return f"{alike} and is {made}"
        return f"{alike} and comes first by name"

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
    """The position of a backend in a preference, lower first; None if the preference excludes it."""
    if preference is None:
        return 0
    if name in preference:
        return preference.index(name)
    return preference.index(REST) if REST in preference else None


def filter_cards(
    records: Sequence[BackendRecord], request: Request, preference: Preference | None
) -> tuple[list[Candidate], list[Decision]]:
    """Candidates by preference, priority, fitness and name; and the verdicts on all other backends, broken ones last.

    Of two candidates with equal priority, one whose card has graph-safe rows alone comes first if the request is
    graph-safe, and last if it is not, because the other one serves eager calls in more ways.
    """
    eligible: list[Candidate] = []
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
            named = shown(preference or ())
            refused.append(
                record.decision("refused", f"the preference is closed and names {named}; name {record.name} or add '*'")
            )
        else:
            unfit = for_graphs(record) != request.graph_safe
            eligible.append(Candidate(record, row, place, record.name in (preference or ()), unfit))
    return sorted(eligible, key=lambda candidate: candidate.rank), refused + broken


def for_graphs(record: BackendRecord) -> bool:
    """True where every row of the backend's card is graph-safe."""
    return record.card is not None and all(row.graph_safe for row in record.card.capabilities)


class Candidates:
    """Candidates in their final order. `at(i)` is the i-th that binds; later ones are not tried."""

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
        passed_over  why candidates that bind do not serve, by index as in `at`
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
                reason = candidate.chosen_over(self._after(place), self.request)
                verdicts.append(candidate.record.decision("chosen", candidate.with_untried(reason)))
            elif outcome is not None and passed_over and index in passed_over:
                verdicts.append(candidate.record.decision("refused", passed_over[index]))
            else:
                after = f"{SERVES}; {winner[0].name} comes first" if winner else SERVES
                verdicts.append(candidate.record.decision("eligible", candidate.with_untried(after)))
        return (*verdicts, *self._others)

    def _after(self, place: int) -> list[Candidate]:
        """The candidates after this place that have not been seen to refuse."""
        outcomes = dict(enumerate(self._outcomes))
        later = list(enumerate(self._order))[place + 1 :]
        return [candidate for number, candidate in later if not isinstance(outcomes.get(number), Decision)]
