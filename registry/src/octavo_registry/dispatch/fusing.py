"""Who fuses a quantizer with the activation, the gradient or the norm before it: one rule for every front end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo import NoBackendError, QuantizerSpec
from octavo_registry.contract.plan import Decision, Plan
from octavo_registry.contract.request import FusedRequest, Request

UNREAD = QuantizerSpec(scaling="mxfp8", format="e4m3", orientation="rowwise")
"""What is asked for where nobody reads codes. A backend without a function for values alone makes them in one pass,
which is worth a byte per element that is thrown away."""


def fusing(plan: Callable[[FusedRequest], Plan], chosen: Plan, request: FusedRequest, *, codes: bool) -> Plan | str:
    """The plan of a fused operation, or the reason why its parts run one after the other.

    plan    plans a request, NoBackendError where nothing serves it
    chosen  the plan of the operation that it is fused with
    codes   a GEMM reads what is quantized
    """
    try:
        fused = plan(request)
    except NoBackendError as error:
        return unserved(request, error.decisions)
    verdicts = {decision.backend: decision.verdict for decision in chosen.decisions}
    if fused.backend != chosen.backend and (not codes or verdicts.get(fused.backend) == "eligible"):
        # who computes is chosen by preference and priority, not by who fuses
        return f"{chosen.backend} was chosen for {chosen.request.op} and serves no {request.op}"
    return fused


def unserved(request: Request, decisions: Iterable[Decision]) -> str:
    """Why a front end's own operations run in place of a backend's: what each backend says."""
    refusals = (f"{decision.backend}: {decision.reason}" for decision in decisions)
    return "; ".join([f"no backend serves {request.op}", *refusals])
