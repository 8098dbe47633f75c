"""Fused quantizers composed of torch's operations and a plan's quantizer, for where no backend fuses them.

Computed in fp32 and rounded once; from the rounded rows on, the bits are the quantizer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo_registry.contract.cards import Activation, Norm
from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_torch.arithmetic import operations
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.functions.activations import activate, activate_gradient, probs_gradient
from octavo_torch.functions.norms import normalize
from octavo_torch.quantizers.extras import Extras

Wanted = tuple[str, ...]


def _quantized(
    quantizer: QuantizePlan, rows: Tensor, group_sizes: Tensor, wanted: Wanted, how: dict[str, Any]
) -> tuple[GroupedTensor, Extras]:
    extras = Extras(activated=rows if "activated" in wanted else None)
    bound = quantizer.bound
    if "amax" in wanted and bound.with_amax is not None:
        q, extras.amax = bound.with_amax(rows, group_sizes, **how)
        return q, extras
    if "amax" in wanted:
        extras.amax = operations.group_amax_of(rows, group_sizes)
    return bound.run(rows, group_sizes, **how), extras


@dataclass(frozen=True, slots=True)
class ComposedActivation:
    """ "act_quantize" by `quantizer`, the plan of "quantize" for what the activation returns."""

    quantizer: QuantizePlan
    activation: Activation

    def __call__(
        self, x: Tensor, group_sizes: Tensor, *, wanted: Wanted, probs: Tensor | None = None, **how: Any
    ) -> tuple[GroupedTensor, Extras]:
        return _quantized(self.quantizer, activate(x, probs, self.activation), group_sizes, wanted, how)


@dataclass(frozen=True, slots=True)
class ComposedGradient:
    """ "dact_quantize" by `quantizer`, the plan of "quantize" for the gradient."""

    quantizer: QuantizePlan
    activation: Activation

    def __call__(
        self, dy: Tensor, x: Tensor, group_sizes: Tensor, *, wanted: Wanted, probs: Tensor | None = None, **how: Any
    ) -> tuple[GroupedTensor, Extras]:
        rows = activate_gradient(dy, x, probs, self.activation)
        q, extras = _quantized(self.quantizer, rows, group_sizes, wanted, how)
        sizes = operations.bound_sizes(group_sizes, x.shape[0], x)
        if "dbias" in wanted:
            extras.dbias = operations.bias_grads(rows, sizes, None, None)[0]
        if "dprobs" in wanted:
            in_groups = torch.arange(x.shape[0], device=x.device) < sizes.sum()
            extras.dprobs = torch.where(in_groups, probs_gradient(dy, x, self.activation), 0.0)
        return q, extras


@dataclass(frozen=True, slots=True)
class ComposedNorm:
    """ "norm_quantize" by `quantizer`, the plan of "quantize" for the normalized rows."""

    quantizer: QuantizePlan
    norm: Norm

    def __call__(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        group_sizes: Tensor,
        *,
        wanted: Wanted,
        epsilon: float,
        **how: Any,
    ) -> tuple[GroupedTensor, Extras]:
        normalized = normalize(x, gamma, beta, self.norm, epsilon)
        q, extras = _quantized(self.quantizer, normalized.y, group_sizes, wanted, how)
        extras.mean, extras.rstd = normalized.mean, normalized.rstd
        return q, extras
