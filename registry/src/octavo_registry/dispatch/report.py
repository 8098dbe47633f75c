"""The text of a failure: what was asked for, every verdict, and what to install."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo_registry.contract.plan import Decision, decision_table
from octavo_registry.contract.request import Request, describe_request
from octavo_registry.discovery.guard import LOGGER
from octavo_registry.discovery.install import how_to_install
from octavo_registry.discovery.names import FRONT_ENDS
from octavo_registry.discovery.records import BackendRecord


def explain_failure(request: Request, decisions: Sequence[Decision], records: Iterable[BackendRecord]) -> str:
    """The message of `NoBackendError`: what was asked for, every verdict, and what to install where nothing is."""
    lines = [f"nothing here runs {describe_request(request)}."]
    if decisions:
        lines.append(decision_table(decisions))
    if any(decision.verdict == "broken" for decision in decisions):
        lines.append(f"  `octavo doctor --traceback`, or the logger {LOGGER!r} at level DEBUG, shows where they broke")
    served = {row.framework for record in records if record.card for row in record.card.capabilities}
    if request.framework not in served:
        front_end = FRONT_ENDS.get(request.framework)
        if front_end is not None:
            lines.append(f"  No backend for {request.framework} is installed; {how_to_install(front_end)}")
        else:
            known = ", ".join(sorted(served | set(FRONT_ENDS)))
            lines.append(f"  No installed package serves framework {request.framework!r}; known ones are {known}")
    return "\n".join(lines)
