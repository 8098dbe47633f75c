"""The functions of requests for fused quantizers, as octavo_registry.contract.fused has them."""

from __future__ import annotations

from typing import Any

from jax import Array

from octavo_jax import GroupedTensor
from octavo_jax.functions.composed import BoundFused, Extras
from octavo_jax_native.quantizers.functional import act_quantize, dact_quantize, norm_quantize
from octavo_registry.contract import (
    BoundActQuantize,
    BoundDactQuantize,
    BoundNormQuantize,
    FusedRequest,
    NormRequest,
    Wanted,
)


def bind_fused(request: FusedRequest) -> BoundFused:
    """The kernels' function for `request`, which is jitted.

    All extras are made, wanted or not: under `jax.jit` those that nobody reads cost nothing.
    """
    spec = request.quantizer
    asked: dict[str, Any] = {
        "layouts": request.layouts,
        "activated": True,
        "amax": spec.scaling == "delayed",
    }
    if isinstance(request, NormRequest):
        asked["norm"] = request.norm

        def run_norm(
            x: Array,
            gamma: Array,
            beta: Array | None = None,
            group_sizes: Array | None = None,
            *,
            wanted: Wanted = None,
            **how: Any,
        ) -> tuple[GroupedTensor, Extras]:
            return norm_quantize(x, spec, group_sizes, gamma=gamma, beta=beta, **asked, **how)

        return BoundNormQuantize(run_norm)
    asked["activation"] = request.activation

    def run(
        x: Array, group_sizes: Array | None = None, *, wanted: Wanted = None, **how: Any
    ) -> tuple[GroupedTensor, Extras]:
        return act_quantize(x, spec, group_sizes, **asked, **how)

    def run_gradient(
        dy: Array, x: Array, group_sizes: Array | None = None, *, wanted: Wanted = None, **how: Any
    ) -> tuple[GroupedTensor, Extras]:
        return dact_quantize(dy, x, spec, group_sizes, **asked, **how)

    return BoundActQuantize(run) if request.op == "act_quantize" else BoundDactQuantize(run_gradient)
