"""`octavo why` on CUDA: who serves an eager call and who one that is captured into a CUDA graph, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import octavo_registry
from octavo_registry.contract.plan import Decision
from octavo_registry.contract.request import Request

Ways = Mapping[str, Decision | None]
"""The chosen backend of "eager" and of "graph", None where none serves; empty where there are no CUDA graphs."""

_TITLES = {"eager": "Eagerly", "graph": "In a CUDA graph"}


def ways(request: Request, decisions: Sequence[Decision], backend: Sequence[str] | None) -> Ways:
    """`decisions` are the answer to `request`; the registry is asked for the other way."""
    if request.device != "cuda":
        return {}
    other = octavo_registry.explain(replace(request, graph_safe=not request.graph_safe), backend=backend)
    eager, graph = (other, decisions) if request.graph_safe else (decisions, other)
    return {"eager": _chosen(eager), "graph": _chosen(graph)}


def lines(choices: Ways) -> list[str]:
    """One line for each way."""
    return [
        f"{_TITLES[way]}: {decision.backend} ({decision.reason})" if decision else f"{_TITLES[way]}: nothing serves it"
        for way, decision in choices.items()
    ]


def ways_json(choices: Ways) -> dict[str, str | None]:
    """The names alone."""
    return {way: None if decision is None else decision.backend for way, decision in choices.items()}


def _chosen(decisions: Sequence[Decision]) -> Decision | None:
    return next((decision for decision in decisions if decision.verdict == "chosen"), None)
