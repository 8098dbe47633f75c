"""Whether a backend fuses a quantizer with the activation, gradient or norm before it: one rule for all front ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo import NoBackendError, QuantizerSpec
from octavo_registry.contract.plan import Decision, Plan
from octavo_registry.contract.request import FusedRequest, Request

UNREAD = QuantizerSpec(scaling="mxfp8", format="e4m3", orientation="rowwise")
"""The quantizer of a fused request whose codes nothing reads. A backend that has no function for the values alone then
writes codes in vain, a byte per element, which costs less than a second pass."""


def fusing(plan: Callable[[FusedRequest], Plan], chosen: Plan, request: FusedRequest, *, codes: bool) -> Plan | str:
    """The plan of a fused operation; or, as text, why the activation and the quantizer run one after the other.

    plan    plans a request; raises NoBackendError where nothing serves it
    chosen  the plan of the operation that would be fused: the quantizer, or the GEMM if nothing is quantized
    codes   whether a GEMM reads what is quantized
    """
    try:
        fused = plan(request)
    except NoBackendError as error:
        return unserved(request, error.decisions)
    verdicts = {decision.backend: decision.verdict for decision in chosen.decisions}
    if fused.backend != chosen.backend and (not codes or verdicts.get(fused.backend) == "eligible"):
        # a backend is chosen by preference and priority, and fusing must not overrule that
        return f"{chosen.backend} was chosen for {chosen.request.op} and serves no {request.op}"
    return fused


def unserved(request: Request, decisions: Iterable[Decision]) -> str:
    """The reason why no backend serves `request`: what each of them says."""
    refusals = (f"{decision.backend}: {decision.reason}" for decision in decisions)
    return "; ".join([f"no backend serves {request.op}", *refusals])
