"""What `octavo why` has found out: the verdicts, the composition, and both as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import octavo_registry
from octavo import NoBackendError
from octavo.recipe_base import GEMMS
from octavo_registry.cli.why.changes import Change, nearest_changes, serves_elsewhere, serves_here
from octavo_registry.cli.why.chips import Chip
from octavo_registry.cli.why.emulated import Emulated, emulated_by_cards, emulated_in
from octavo_registry.cli.why.graph import Ways, ways, ways_json
from octavo_registry.cli.why.kernels import Kernels, ask, kernels_json
from octavo_registry.cli.why.parts import Part, compose_parts
from octavo_registry.cli.why.question import COMPOSED, MLP, MOE, Question
from octavo_registry.contract.plan import Decision, Plan, decision_table
from octavo_registry.contract.request import Request
from octavo_registry.discovery.install import what_is_missing
from octavo_registry.dispatch.layer_plan import LayerPlan


@dataclass(frozen=True, slots=True)
class Answer:
    """What `octavo why` has found out.

    judged    the request that `decisions` are about: of a composition its first product's, as the layer asks for it
    layer     the composition of a GEMM's or a layer's question; None where it cannot be composed or was not asked
    parts     of an MLP or a MoE layer
    obstacle  why the composition fails; "" otherwise
    kernels   None where they were not asked for
    chip      of `--hypothetical`
    each      of a hypothetical composition: who would serve each of its requests
    exchange  of `--ranks`: what a MoE layer exchanges, and how
    emulated  products without instructions of the device for their recipe
    missing   a sentence on a package of Octavo's that is not installed and would help; "" otherwise
    """

    question: Question
    judged: Request
    served: bool
    decisions: Sequence[Decision]
    ways: Ways
    changes: Sequence[Change]
    layer: LayerPlan | None = None
    parts: Sequence[Part] = ()
    obstacle: str = ""
    kernels: Sequence[Kernels] | None = None
    chip: Chip | None = None
    each: Sequence[tuple[Request, Decision | None]] = ()
    exchange: Sequence[tuple[str, str]] = ()
    emulated: Sequence[Emulated] = ()
    missing: str = ""

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        document = {
            "request": request_json(self.question.request()),
            "asked_for": {"recipe": self.question.recipe.kind, "fingerprint": self.question.recipe.fingerprint},
            "served": self.served,
            "decisions": [decision_json(decision) for decision in self.decisions],
            "ways": ways_json(self.ways),
            "changes": [asdict(change) for change in self.changes],
            "emulated": [asdict(products) for products in self.emulated],
            "missing": self.missing or None,
            "layer": None if self.layer is None else layer_json(self.layer),
            "layer_error": self.obstacle or None,
        }
        if self.parts:
            document["parts"] = [asdict(part) for part in self.parts]
        if self.exchange:
            document["exchange"] = dict(self.exchange)
        if self.kernels is not None:
            document["kernels"] = kernels_json(self.kernels)
        if self.chip is not None:
            document["hypothetical"] = self.chip.name
            document["operations"] = [
                {"request": request_json(request), "backend": None if one is None else one.backend}
                for request, one in self.each
            ]
        return document


def answer(question: Question, backend: Sequence[str] | None, rows: int | None) -> Answer:
    """The verdicts of this machine."""
    request = question.request()
    gemms = {} if rows is None else question.gemm_requests()
    decisions = octavo_registry.explain(request, backend=backend)
    served = any(decision.verdict == "chosen" for decision in decisions)
    layer: LayerPlan | None = None
    parts: list[Part] = []
    obstacle = ""
    emulated: Sequence[Emulated] = ()
    try:
        if question.op in (MLP, MOE):
            parts = compose_parts(question, backend)
        if question.op in (*GEMMS, *COMPOSED):
            layers = [octavo_registry.plan_layer(one, backend=backend) for one in question.layers().values()]
            emulated = emulated_in(layers)
            layer = None if question.op in (MLP, MOE) else layers[0]
        if question.op in COMPOSED:
            # not those of the request by itself: a layer may transpose w, or pass over whoever needs another layout
            request, decisions = layers[0].fprop.request, layers[0].fprop.decisions
    except NoBackendError as error:
        # the verdicts that stand above are not said twice
        repeated = decision_table(error.decisions) == decision_table(decisions)
        obstacle = str(error).splitlines()[0] if repeated else str(error)
    if question.op in COMPOSED:
        served = not obstacle
    changes = [] if backend else nearest_changes(question, decisions, serves_here)
    return Answer(
        question,
        request,
        served,
        decisions,
        ways(request, decisions, backend),
        changes,
        layer,
        parts,
        obstacle,
        None if rows is None else ask(gemms, rows, backend),
        emulated=emulated,
        missing="" if backend else _missing(request, decisions),
    )


def suppose(question: Question, backend: Sequence[str] | None, chip: Chip) -> Answer:
    """What cards and shape rules say of a chip that need not be here. Nothing is bound, so there are no layouts."""
    decisions = octavo_registry.hypothesize(question.request(), backend=backend)
    each = []
    for request in question.requests() if question.op in COMPOSED else ():
        verdicts = octavo_registry.hypothesize(request, backend=backend)
        each.append((request, next((one for one in verdicts if one.verdict == "chosen"), None)))
    served = all(one for _, one in each) if each else any(one.verdict == "chosen" for one in decisions)
    changes = [] if backend else nearest_changes(question, decisions, serves_elsewhere)
    asked = each or [(question.request(), next((one for one in decisions if one.verdict == "chosen"), None))]
    return Answer(
        question,
        question.request(),
        served,
        decisions,
        {},
        changes,
        chip=chip,
        each=each,
        emulated=emulated_by_cards((request, one.backend) for request, one in asked if one is not None),
        missing="" if backend else _missing(question.request(), decisions),
    )


def _missing(request: Request, decisions: Sequence[Decision]) -> str:
    """What of Octavo's is not installed and would help."""
    serving = next((decision.backend for decision in decisions if decision.verdict == "chosen"), None)
    cards = [record.card for record in octavo_registry.backends() if record.card is not None]
    any_backend = any(row.framework == request.framework for card in cards for row in card.capabilities)
    return what_is_missing(
        request.framework, request.device, request.arch, serving, any_backend=any_backend, op=request.op
    )


def layer_json(layer: LayerPlan) -> dict[str, Any]:
    """A composition as JSON."""
    plans: dict[str, Plan | None] = dict((*layer.quantizers, *layer.gemms))
    whole: dict[str, Any] = {
        "weight": layer.weight,
        "transposes": layer.transposes,
        "batch_invariant": layer.batch_invariant,
    }
    return whole | {
        name: plan
        and {
            "backend": plan.backend,
            "recipe": plan.request.kind,
            "layouts": dict(zip(("rowwise", "columnwise"), plan.request.layouts, strict=True))
            if name.startswith("quantize")
            else dict(plan.layouts),
            "note": plan.note,
        }
        for name, plan in plans.items()
    }


def request_json(request: Request) -> dict[str, Any]:
    """A request as JSON."""
    return {
        "op": request.op,
        "recipe": request.kind,
        "framework": request.framework,
        "device": request.device,
        "arch": list(request.arch) if request.arch else None,
        "in_dtype": request.in_dtype,
        "out_dtype": request.out_dtype,
        "k": request.k,
        "n": request.n,
        "groups": request.groups,
        "sizes": request.sizes,
        "graph_safe": request.graph_safe,
        "training": request.training,
        "weight": request.weight,
        "activation": request.activation,
        "norm": request.norm,
    }


def decision_json(decision: Decision) -> dict[str, str]:
    """A verdict as JSON."""
    return {
        "backend": decision.backend,
        "distribution": decision.distribution,
        "version": decision.version,
        "verdict": decision.verdict,
        "reason": decision.reason,
    }
