"""Fused functions composed of plain JAX and a quantizer: computed in fp32, rounded once, then quantized.

From the rounded array on, the bits are the quantizer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array

from octavo import QuantizerSpec
from octavo_jax.arithmetic.gemm import group_sums
from octavo_jax.arrays.exportable import exportable_tuple
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.arrays.sizes import one_group
from octavo_jax.functions.activations import octavo_activation, octavo_activation_gradient
from octavo_jax.functions.norms import NormSpec, octavo_normalization
from octavo_jax.scaling.delayed_state import amax_of
from octavo_registry.contract.cards import Activation, Norm
from octavo_registry.contract.fused import BoundActQuantize, BoundDactQuantize, BoundNormQuantize, Wanted
from octavo_registry.contract.quantize import BoundQuantize, Quantize, QuantizeWithAmax
from octavo_registry.contract.request import FusedRequest, NormRequest


@exportable_tuple
class Extras(NamedTuple):
    """What a fused function returns beside codes and scales; None where it does not apply.

    activated     what was quantized, in the input's dtype
    amax          [G] float32: max |.| of it, NaN winning
    dequantized   [M, C] bfloat16: row codes times their scales, where it was wanted and the backend has it
    dbias         [G, C] float32: its column sums, in a fixed order
    mean, rstd    [M] float32 statistics of a normalization; RMSNorm has no mean
    dprobs        [M] float32: the gradient of probs, where the backend makes it
    forward       [M, F] beside an activation's gradient without codes: the activation times probs
    """

    activated: Array | None = None
    amax: Array | None = None
    dequantized: Array | None = None
    dbias: Array | None = None
    mean: Array | None = None
    rstd: Array | None = None
    dprobs: Array | None = None
    forward: Array | None = None


def _sizes(group_sizes: Array | None, rows: Array) -> Array:
    return one_group(rows.shape[0]) if group_sizes is None else group_sizes


@dataclass(frozen=True, slots=True)
class ComposedQuantizer:
    """A quantizer of ragged rows that also returns what it quantized; two are equal where their functions are."""

    run: Quantize[Array, GroupedTensor]
    with_amax: QuantizeWithAmax[Array, GroupedTensor] | None
    records_amax: bool

    @classmethod
    def of(cls, bound: BoundQuantize[Array, GroupedTensor], spec: QuantizerSpec) -> ComposedQuantizer:
        """The quantizer by `spec`; the amax is what delayed scaling records, and no other does."""
        return cls(bound.run, bound.with_amax, spec.scaling == "delayed")

    def __call__(self, activated: Array, group_sizes: Array | None, **how: Any) -> tuple[GroupedTensor, Extras]:
        """Codes and scales of `activated`, and as extras `activated` itself and its amax."""
        group_sizes = _sizes(group_sizes, activated)
        if not self.records_amax:
            return self.run(activated, group_sizes, **how), Extras(activated=activated)
        if self.with_amax is not None:
            q, amax = self.with_amax(activated, group_sizes, **how)
            return q, Extras(activated=activated, amax=amax)
        return self.run(activated, group_sizes, **how), Extras(
            activated=activated, amax=amax_of(activated, group_sizes)
        )


@dataclass(frozen=True, slots=True)
class ComposedActivation:
    """`run` of "act_quantize"."""

    quantize: ComposedQuantizer
    activation: Activation

    def __call__(
        self,
        x: Array,
        group_sizes: Array | None = None,
        *,
        probs: Array | None = None,
        wanted: Wanted = None,
        **how: Any,
    ) -> tuple[GroupedTensor, Extras]:
        return self.quantize(octavo_activation(x, probs, activation=self.activation), group_sizes, **how)


@dataclass(frozen=True, slots=True)
class ComposedGradient:
    """`run` of "dact_quantize"."""

    quantize: ComposedQuantizer
    activation: Activation

    def __call__(
        self,
        dy: Array,
        x: Array,
        group_sizes: Array | None = None,
        *,
        probs: Array | None = None,
        wanted: Wanted = None,
        **how: Any,
    ) -> tuple[GroupedTensor, Extras]:
        activated = octavo_activation_gradient(dy, x, probs, activation=self.activation)
        q, extras = self.quantize(activated, group_sizes, **how)
        return q, extras._replace(dbias=group_sums(activated, _sizes(group_sizes, activated)))


@dataclass(frozen=True, slots=True)
class ComposedNorm:
    """`run` of "norm_quantize"."""

    quantize: ComposedQuantizer
    norm: Norm

    def __call__(
        self,
        x: Array,
        gamma: Array,
        beta: Array | None = None,
        group_sizes: Array | None = None,
        *,
        epsilon: float = 1e-6,
        wanted: Wanted = None,
        **how: Any,
    ) -> tuple[GroupedTensor, Extras]:
        normalized = octavo_normalization(x, gamma, beta, spec=NormSpec(self.norm, epsilon))
        q, extras = self.quantize(normalized.y, group_sizes, **how)
        return q, extras._replace(mean=normalized.mean, rstd=normalized.rstd)


BoundFused = (
    BoundActQuantize[Array, GroupedTensor]
    | BoundDactQuantize[Array, GroupedTensor]
    | BoundNormQuantize[Array, GroupedTensor]
)


def bind_fused(request: FusedRequest, quantizer: BoundQuantize[Array, GroupedTensor]) -> BoundFused:
    """The answer to a request for a fused quantizer, from that of its "quantize" alone.

    All extras are made, wanted or not: under `jax.jit` those that nobody reads cost nothing.
    """
    composed = ComposedQuantizer.of(quantizer, request.quantizer)
    if isinstance(request, NormRequest):
        return BoundNormQuantize(ComposedNorm(composed, request.norm))
    if request.op == "act_quantize":
        return BoundActQuantize(ComposedActivation(composed, request.activation))
    return BoundDactQuantize(ComposedGradient(composed, request.activation))
