"""Quantizers fused with the activation, or its gradient, before them: which backend's function serves, or why none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

import octavo_registry as registry
from octavo import NoBackendError, QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo_registry.contract.cards import Activated, Activation
from octavo_registry.contract.plan import Plan
from octavo_registry.dispatch.layer_requests import activation_request, quantize_request
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.dispatch.layer import Layer

_UNREAD = QuantizerSpec(scaling="mxfp8", format="e4m3", orientation="rowwise")
"""What is asked for where nobody reads codes: one pass is worth a byte an element that is thrown away."""


class Extras(NamedTuple):
    """What a fused function makes beside codes and scales; None where it was not asked for.

    activated   [M, C] what was quantized, in the input's dtype; rows past the sum mean nothing
    amax        fp32 [G]: max |.| of it, NaN winning
    dbias       fp32 [G, C]: its column sums by group, in a fixed order
    dprobs      fp32 [M]: the gradient of probs, sums along rows in a fixed order
    mean, rstd  fp32 [M]: statistics of a normalization; RMSNorm has no mean
    """

    activated: Tensor | None = None
    amax: Tensor | None = None
    dbias: Tensor | None = None
    dprobs: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None


Run = Callable[..., tuple[GroupedTensor, Extras]]
"""octavo_registry.contract.fused.ActQuantize or DactQuantize."""


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


def _fused(op: Activated, layer: Layer, operand: Operand, activation: Activation, *, array: bool) -> Fused:
    quantizer = layer.quantizers.get(operand)
    codes = quantizer is not None
    if quantizer is None:
        chosen: Plan = layer.plan.fprop
        request = quantize_request(layer.plan.fprop.request, _UNREAD, operand, (PLAIN, PLAIN))
    else:
        chosen, request = quantizer, quantizer.request
    try:
        plan = registry.plan(activation_request(request, op, activation), backend=layer.backend)
    except NoBackendError as error:
        refusals = (f"{decision.backend}: {decision.reason}" for decision in error.decisions)
        return Fused(None, None, "; ".join([f"no backend serves {op}", *refusals]), codes, array)
    verdicts = {decision.backend: decision.verdict for decision in chosen.decisions}
    if plan.backend != chosen.backend and (not codes or verdicts.get(plan.backend) == "eligible"):
        # who computes is chosen by preference and priority, not by who fuses
        return Fused(
            None, None, f"{chosen.backend} was chosen for {chosen.request.op} and serves no {op}", codes, array
        )
    return Fused(plan, plan.run, "", codes, array)
