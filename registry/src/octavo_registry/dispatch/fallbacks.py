"""Backends that are installed, cannot run, and are replaced by a slower one: what a warning says of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from octavo_registry.contract.plan import Decision, Plan
from octavo_registry.discovery.guard import Fault, guard
from octavo_registry.discovery.names import FRONT_ENDS, RESERVED
from octavo_registry.discovery.records import BackendRecord
from octavo_registry.dispatch.candidates import position
from octavo_registry.dispatch.match import match
from octavo_registry.dispatch.preference import ENVIRONMENT, Preference


class FallbackWarning(RuntimeWarning):
    """An installed backend cannot run on this machine, and a slower one serves in its place."""


def fallbacks(
    plans: Iterable[Plan], records: Sequence[BackendRecord], preference: Preference | None
) -> Iterator[tuple[str, str]]:
    """Name and message of each backend that a fault of the installation keeps from serving one of these plans.

    Plans on a CPU have none: there a reference backend is what most environments mean to use. A backend that refuses
    a request, because of its device, its sides or its recipe, is not at fault; `decisions` has its reason.
    """
    named = {record.name: record for record in records if record.card is not None and record.verdict is None}
    for plan in plans:
        serving = named[plan.backend].card if plan.backend in named else None
        if plan.request.device == "cpu" or serving is None:
            continue
        for decision in plan.decisions:
            record = _at_fault(decision, records)
            if record is None or position(preference, record.name) is None:
                continue
            if record.card is None:
                replaced = serving.priority < 0 and _may_serve(record.name, plan.request.framework)
            else:
                replaced = record.card.priority > serving.priority and _would_serve(record, plan)
            if replaced:
                yield record.name, _message(decision, plan, slow=serving.priority < 0)


def _at_fault(decision: Decision, records: Sequence[BackendRecord]) -> BackendRecord | None:
    """The backend of a verdict that is about its installation and not about the request; None for other verdicts."""
    for record in records:
        if (record.name, record.distribution) == (decision.backend, decision.distribution):
            faulty = decision.verdict == "broken" or (decision.verdict == "refused" and record.verdict == "refused")
            return record if faulty else None
    return None


def _may_serve(name: str, framework: str) -> bool:
    """Whether a plugin without a card may serve the framework: the names of Octavo's own begin with theirs."""
    of = name.split("-")[0]
    return name not in RESERVED or of not in FRONT_ENDS or of == framework


def _would_serve(record: BackendRecord, plan: Plan) -> bool:
    assert record.card is not None
    try:
        return not isinstance(guard(match, record.card, plan.request), str)
    except Fault:
        return False


def _message(decision: Decision, plan: Plan, slow: bool) -> str:
    request, name = plan.request, decision.backend
    origin = f"{decision.distribution} {decision.version}".strip()
    # every layer of a model on an H200 was seen to run so
    cost = ", which is slower by an order of magnitude or more" if slow else ""
    return (
        f"backend {name} of {origin} cannot run here: {decision.reason}. {plan.backend} serves {request.op} in "
        f"{request.kind} on {request.device} in its place{cost}. `octavo doctor` tells more; "
        f"octavo_registry.prefer({name!r}), or {ENVIRONMENT}={name}, makes this an error"
    )
