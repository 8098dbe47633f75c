"""An activation, its gradient, or a normalization, together with the quantizer of its result.

Each function here takes the quantizer's plan, which has the spec and layouts that the GEMMs read. A backend may serve
both steps as one function. Otherwise they are composed: plain JAX, rounded once, then the quantizer's own `run`. From
the rounded array on, the bits of both are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from jax import Array

import octavo_registry
from octavo.grouped_tensor import PLAIN
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.layer import Layer
from octavo_jax.functions.composed import ComposedActivation, ComposedGradient, ComposedNorm, ComposedQuantizer, Extras
from octavo_jax.functions.norms import NormSpec
from octavo_registry import LayerPlan, Plan, QuantizePlan
from octavo_registry.contract.cards import Activated, Activation
from octavo_registry.contract.fused import BoundActQuantize, BoundDactQuantize
from octavo_registry.contract.request import FusedRequest
from octavo_registry.dispatch.fusing import UNREAD, fusing
from octavo_registry.dispatch.layer_requests import activation_request, norm_request, quantize_request

FusedQuantizer = Callable[..., tuple[Any, Extras]]
"""The function of a fused operation; its first result is a GroupedTensor, or TwoForms of one if a layer reads both."""

BoundActivation = BoundActQuantize[Array, GroupedTensor] | BoundDactQuantize[Array, GroupedTensor]

ValuesFunction = Callable[..., Extras]
"""Computes an activation or its gradient without quantizing: octavo_registry.contract.fused.ActValues or DactValues."""


def _plan_if_fused(quantizer: QuantizePlan, request: FusedRequest, backend: BackendNames) -> Plan | None:
    """The plan of the fused operation; None if no backend fuses it, or one that was not chosen to quantize."""
    plan = fusing(partial(octavo_registry.plan, backend=backend), quantizer, request, codes=True)
    return None if isinstance(plan, str) else plan


def describe_fusion(quantizer: QuantizePlan, op: Activated, activation: Activation, backend: BackendNames) -> str:
    """In words: who fuses the activation, or its gradient, with this quantizer; or that it is composed, and why."""
    request = activation_request(quantizer.request, op, activation)
    plan = fusing(partial(octavo_registry.plan, backend=backend), quantizer, request, codes=True)
    return f"composed: {plan}" if isinstance(plan, str) else f"fused by {plan.backend}"


def activation_values(
    layer: LayerPlan, op: Activated, activation: Activation, backend: BackendNames
) -> ValuesFunction | str:
    """What computes the activation (for fc2's layer) or its gradient (for fc1's) as products read it unquantized.

    Returns the function of the layer's backend, or a string that says why it has none.
    """
    quantize = quantize_request(layer.fprop.request, UNREAD, "x" if op == "act_quantize" else "dy", (PLAIN, PLAIN))
    request = activation_request(quantize, op, activation)
    plan = fusing(partial(octavo_registry.plan, backend=backend), layer.fprop, request, codes=False)
    if isinstance(plan, str):
        return plan
    values = cast("ValuesFunction | None", cast("BoundActivation", plan.bound).values)
    return f"{plan.backend} does not compute it without codes" if values is None else values


def describe_values(layer: LayerPlan, op: Activated, activation: Activation, backend: BackendNames) -> str:
    """In words: who computes `activation_values`, or why JAX's operations do."""
    values = activation_values(layer, op, activation, backend)
    return f"composed: {values}" if isinstance(values, str) else f"in one pass by {layer.fprop.backend}, not quantized"


def _run(plan: Plan, layer: Layer | None) -> FusedQuantizer:
    return cast("FusedQuantizer", (plan.bound if layer is None else layer.in_two_forms(plan)).run)


def _quantizer(plan: QuantizePlan) -> ComposedQuantizer:
    return ComposedQuantizer.of(plan.bound, plan.request.quantizer)


@dataclass(frozen=True, slots=True)
class _WithEpsilon:
    run: FusedQuantizer
    epsilon: float

    def __call__(self, *arrays: Array | None, **how: Any) -> tuple[Any, Extras]:
        return self.run(*arrays, epsilon=self.epsilon, **how)


def activation_run(
    quantizer: QuantizePlan, activation: Activation, backend: BackendNames, layer: Layer | None = None
) -> FusedQuantizer:
    """The function of octavo_registry.contract.fused.ActQuantize, in the forms that `layer` reads, if it is for one."""
    plan = _plan_if_fused(quantizer, activation_request(quantizer.request, "act_quantize", activation), backend)
    return ComposedActivation(_quantizer(quantizer), activation) if plan is None else _run(plan, layer)


def gradient_run(
    quantizer: QuantizePlan, activation: Activation, backend: BackendNames, layer: Layer | None = None
) -> FusedQuantizer:
    """The function of octavo_registry.contract.fused.DactQuantize; dy and x have one dtype, the extras hold dbias."""
    plan = _plan_if_fused(quantizer, activation_request(quantizer.request, "dact_quantize", activation), backend)
    return ComposedGradient(_quantizer(quantizer), activation) if plan is None else _run(plan, layer)


def norm_run(
    quantizer: QuantizePlan, spec: NormSpec, backend: BackendNames, layer: Layer | None = None
) -> FusedQuantizer:
    """`run(x, gamma, beta, group_sizes, *, seed, operand, group_offset, scale)`; the extras hold the statistics."""
    plan = _plan_if_fused(quantizer, norm_request(quantizer.request, spec.norm), backend)
    run = ComposedNorm(_quantizer(quantizer), spec.norm) if plan is None else _run(plan, layer)
    return _WithEpsilon(run, spec.epsilon)
