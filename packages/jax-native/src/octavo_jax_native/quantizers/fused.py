"""`Bound.run` of a request for a fused quantizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import Array

from octavo_jax import GroupedTensor
from octavo_jax.functions.composed import Extras
from octavo_jax_native.quantizers.functional import act_quantize, dact_quantize, norm_quantize
from octavo_registry.contract.request import Request

Run = Callable[..., tuple[GroupedTensor, Extras]]


def bind_fused(request: Request) -> Run:
    """The kernels' function for `request`, which is jitted; extras that nobody reads are not made under jit."""
    spec = request.quantizer
    assert spec is not None
    asked: dict[str, Any] = {
        "layouts": request.layouts,
        "activated": True,
        "amax": spec.scaling == "delayed",
    }
    if request.op == "norm_quantize":
        if request.norm is None:
            raise ValueError("a norm_quantize request names no norm; give Request.norm")
        asked["norm"] = request.norm

        def run_norm(
            x: Array, gamma: Array, beta: Array | None = None, group_sizes: Array | None = None, **how: Any
        ) -> tuple[GroupedTensor, Extras]:
            return norm_quantize(x, spec, group_sizes, gamma=gamma, beta=beta, **asked, **how)

        return run_norm
    if request.activation is None:
        raise ValueError(f"a {request.op} request names no activation; give Request.activation")
    asked["activation"] = request.activation

    def run(x: Array, group_sizes: Array | None = None, **how: Any) -> tuple[GroupedTensor, Extras]:
        return act_quantize(x, spec, group_sizes, **asked, **how)

    def run_gradient(dy: Array, x: Array, group_sizes: Array | None = None, **how: Any) -> tuple[GroupedTensor, Extras]:
        return dact_quantize(dy, x, spec, group_sizes, **asked, **how)

    return run if request.op == "act_quantize" else run_gradient
