"""Finds the backend that fuses a quantizer with the activation, gradient or norm before it; or says why none does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import octavo_registry as registry
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo_registry.contract import Activated, Activation, FusedRequest, Norm, Plan
from octavo_registry.dispatch.fusing import UNREAD, fusing
from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_registry.dispatch.layer_requests import activation_request, norm_request, quantize_request
from octavo_torch.arrays.checks import BackendNames
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.dispatch.layer import Layer
from octavo_torch.memo import Memo
from octavo_torch.quantizers.composed import ComposedActivation, ComposedGradient, ComposedNorm
from octavo_torch.quantizers.extras import Extras

if TYPE_CHECKING:
    from octavo_registry.contract import AnyBoundActQuantize, AnyBoundDactQuantize

Run = Callable[..., tuple[GroupedTensor, Extras]]
"""octavo_registry.contract.fused.ActQuantize, DactQuantize or NormQuantize."""

Values = Callable[..., Extras]
"""octavo_registry.contract.fused.ActValues or DactValues."""


@dataclass(frozen=True)
class Fused:
    """The activation or the gradient that a layer quantizes, and the backend's function for both steps together.

    plan, run        None if the two steps run one after the other, for the reason that `why` gives
    codes            whether a GEMM reads the quantized result
    high_precision   whether a GEMM reads the result in high precision
    values           the backend's function for the first step alone; None if it has none
    """

    plan: Plan | None
    run: Run | None
    why: str
    codes: bool
    high_precision: bool
    values: Values | None = None

    @property
    def without_codes(self) -> Values | None:
        """`values` if nothing reads codes, else None."""
        return None if self.codes else self.values

    def __str__(self) -> str:
        if self.plan is None:
            return f"composed: {self.why}"
        return f"fused by {self.plan.backend}" if self.codes else f"in one pass by {self.plan.backend}, not quantized"


def activation_quantizer(layer: Layer, activation: Activation) -> Fused:
    """The layer's x: act(h) times probs, quantized."""
    return _fused("act_quantize", layer, "x", activation, high_precision=not layer.quantized_fprop)


def gradient_quantizer(layer: Layer, activation: Activation) -> Fused:
    """The layer's dy: the gradient of h, quantized."""
    read = (layer.need_dx and not layer.quantized_dgrad) or (layer.need_dw and not layer.quantized_wgrad)
    return _fused("dact_quantize", layer, "dy", activation, high_precision=read)


def _fused(op: Activated, layer: Layer, operand: Operand, activation: Activation, *, high_precision: bool) -> Fused:
    quantizer = layer.quantizers.get(operand)
    codes = quantizer is not None
    if quantizer is None:
        chosen: Plan = layer.plan.fprop
        request = quantize_request(layer.plan.fprop.request, UNREAD, operand, (PLAIN, PLAIN))
    else:
        chosen, request = quantizer, quantizer.request
    plan = _fusing(chosen, activation_request(request, op, activation), codes, layer.backend)
    if isinstance(plan, str):
        return Fused(None, None, plan, codes, high_precision)
    plan = layer.multiplied(operand, plan)
    bound = cast("AnyBoundActQuantize | AnyBoundDactQuantize", plan.bound)
    return Fused(plan, plan.run, "", codes, high_precision, cast("Values | None", bound.values))


def _fusing(chosen: Plan, request: FusedRequest, codes: bool, backend: BackendNames) -> Plan | str:
    """The plan of a fused operation, given the plan of the operation that would be fused; or why there is none."""
    return fusing(partial(registry.plan, backend=backend), chosen, request, codes=codes)


_runs: Memo[Run] = Memo()


def activation_run(op: Activated, quantizer: QuantizePlan, activation: Activation, backend: BackendNames) -> Run:
    """The function of "act_quantize" or "dact_quantize" for the plan of a quantizer: a backend's, or composed."""

    def planned() -> Run:
        plan = _fusing(quantizer, activation_request(quantizer.request, op, activation), True, backend)
        if not isinstance(plan, str):
            run: Run = plan.bound.run
            return run
        composed = ComposedActivation if op == "act_quantize" else ComposedGradient
        return composed(quantizer, activation)

    return _runs.get((id(quantizer), op, activation, backend), planned, quantizer)


def norm_run(quantizer: QuantizePlan, norm: Norm, backend: BackendNames) -> Run:
    """The function of "norm_quantize" for the plan of a quantizer: a backend's, or composed."""

    def planned() -> Run:
        plan = _fusing(quantizer, norm_request(quantizer.request, norm), True, backend)
        return ComposedNorm(quantizer, norm) if isinstance(plan, str) else plan.bound.run

    return _runs.get((id(quantizer), "norm_quantize", norm, backend), planned, quantizer)
