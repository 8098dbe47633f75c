"""Which backend fuses a quantizer with the activation, the gradient or the norm before it, or why none does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import octavo_registry as registry
from octavo import NoBackendError, QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo_registry.contract.cards import Activation, Norm
from octavo_registry.contract.request import Plan, Request
from octavo_registry.dispatch.layer_requests import quantize_request
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.dispatch.layer import Layer, Names
from octavo_torch.dispatch.memo import Kept
from octavo_torch.quantizers.composed import ComposedActivation, ComposedGradient, ComposedNorm
from octavo_torch.quantizers.extras import Extras

FusedOp = Literal["act_quantize", "dact_quantize"]

_UNREAD = QuantizerSpec(scaling="mxfp8", format="e4m3", orientation="rowwise")
"""What is asked for where nobody reads codes: one pass is worth a byte an element that is thrown away."""


Run = Callable[..., tuple[GroupedTensor, Extras]]
"""octavo_registry.Bound's "act_quantize" and "dact_quantize", with one keyword more: `wanted`, names of the fields of
Extras that the caller reads. A backend's function that takes it makes no others; one that does not makes them all."""


@dataclass(frozen=True)
class Fused:
    """One fused quantizer of a layer.

    plan, run   None where it is composed of torch's operations and the layer's own quantizer, for the reason in `why`
    codes       a GEMM reads what it quantizes
    array       a GEMM reads what it quantizes as it is, before that
    """

    plan: Plan | None
    run: Run | None
    why: str
    codes: bool
    array: bool

    def __str__(self) -> str:
        if self.plan is None:
            return f"composed: {self.why}"
        return f"fused by {self.plan.backend}" if self.codes else f"in one pass by {self.plan.backend}, not quantized"


def activation_quantizer(layer: Layer, activation: Activation) -> Fused:
    """act(h) times probabilities, quantized as the layer's x."""
    return _fused("act_quantize", layer, "x", activation, array=not layer.quantized_fprop)


def gradient_quantizer(layer: Layer, activation: Activation) -> Fused:
    """The gradient of h, quantized as the layer's dy."""
    array = (layer.need_dx and not layer.quantized_dgrad) or (layer.need_dw and not layer.quantized_wgrad)
    return _fused("dact_quantize", layer, "dy", activation, array=array)


def _fused(op: FusedOp, layer: Layer, operand: Operand, activation: Activation, *, array: bool) -> Fused:
    quantizer = layer.quantizers.get(operand)
    codes = quantizer is not None
    if quantizer is None:
        chosen = layer.plan.fprop
        request = quantize_request(chosen.request, _UNREAD, operand, (PLAIN, PLAIN))
    else:
        chosen, request = quantizer, quantizer.request
    plan = _fusing(chosen, replace(request, op=op, activation=activation), codes, layer.backend)
    if isinstance(plan, str):
        return Fused(None, None, plan, codes, array)
    return Fused(plan, _taking_wanted(plan.run), "", codes, array)


def _fusing(chosen: Plan, request: Request, codes: bool, backend: Names) -> Plan | str:
    """The plan of a fused operation beside the plan of the operation that it is fused with; or why there is none."""
    try:
        plan = registry.plan(request, backend=backend)
    except NoBackendError as error:
        refusals = (f"{decision.backend}: {decision.reason}" for decision in error.decisions)
        return "; ".join([f"no backend serves {request.op}", *refusals])
    verdicts = {decision.backend: decision.verdict for decision in chosen.decisions}
    if plan.backend != chosen.backend and (not codes or verdicts.get(plan.backend) == "eligible"):
        # who computes is chosen by preference and priority, not by who fuses
        return f"{chosen.backend} was chosen for {chosen.request.op} and serves no {request.op}"
    return plan


_runs: Kept[Run] = Kept()


def activation_run(op: FusedOp, quantizer: Plan, activation: Activation, backend: Names) -> Run:
    """The function of "act_quantize" or "dact_quantize" for the plan of a quantizer: a backend's, or composed."""

    def planned() -> Run:
        request = replace(quantizer.request, op=op, activation=activation)
        composed = ComposedActivation if op == "act_quantize" else ComposedGradient
        return _run_of(_fusing(quantizer, request, True, backend)) or composed(quantizer, activation)

    return _runs.get((id(quantizer), op, activation, backend), planned, quantizer)


def norm_run(quantizer: Plan, norm: Norm, backend: Names) -> Run:
    """The function of "norm_quantize" for the plan of a quantizer: a backend's, or composed."""

    def planned() -> Run:
        request = replace(quantizer.request, op="norm_quantize", norm=norm)
        return _run_of(_fusing(quantizer, request, True, backend)) or ComposedNorm(quantizer, norm)

    return _runs.get((id(quantizer), "norm_quantize", norm, backend), planned, quantizer)


def _run_of(plan: Plan | str) -> Run | None:
    return None if isinstance(plan, str) else _taking_wanted(plan.run)


def _taking_wanted(run: Callable[..., Any]) -> Run:
    parameters = inspect.signature(run).parameters
    if "wanted" in parameters or any(part.kind is part.VAR_KEYWORD for part in parameters.values()):
        return run

    def call(*arrays: Any, wanted: tuple[str, ...], **how: Any) -> tuple[GroupedTensor, Extras]:
        result: tuple[GroupedTensor, Extras] = run(*arrays, **how)
        return result

    return call
