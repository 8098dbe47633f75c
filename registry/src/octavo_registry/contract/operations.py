"""The table of operations: what asks for each, and what answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from octavo_registry.contract import fused, gemm, moves, optimizers, quantize
from octavo_registry.contract.bound import Bound
from octavo_registry.contract.cards import Op
from octavo_registry.contract.request import REQUESTS, Request


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation.

    request  the class of its requests
    run      the protocol of its function
    bound    the class of a backend's answer: `run` is of the protocol, and the other fields are what is optional
    """

    op: Op
    request: type[Request]
    run: type[Any]
    bound: type[Bound[Any]]


_ANSWERS: Mapping[Op, tuple[type[Any], type[Bound[Any]]]] = {
    "quantize": (quantize.Quantize, quantize.BoundQuantize),
    "dequantize": (quantize.Dequantize, quantize.BoundDequantize),
    "fprop": (gemm.Fprop, gemm.BoundFprop),
    "dgrad": (gemm.Dgrad, gemm.BoundDgrad),
    "wgrad": (gemm.Wgrad, gemm.BoundWgrad),
    "act_quantize": (fused.ActQuantize, fused.BoundActQuantize),
    "dact_quantize": (fused.DactQuantize, fused.BoundDactQuantize),
    "norm_quantize": (fused.NormQuantize, fused.BoundNormQuantize),
    "route": (moves.Route, moves.BoundRoute),
    "permute_rows": (moves.PermuteRows, moves.BoundPermuteRows),
    "combine_rows": (moves.CombineRows, moves.BoundCombineRows),
    "dot_rows": (moves.DotRows, moves.BoundDotRows),
    "choose_experts": (moves.ChooseExperts, moves.BoundChooseExperts),
    "choose_gradient": (moves.ChooseGradient, moves.BoundChooseGradient),
    "adamw_step": (optimizers.AdamWStep, optimizers.BoundAdamWStep),
}

OPERATIONS: Mapping[Op, Operation] = MappingProxyType(
    {op: Operation(op, REQUESTS[op], run, bound) for op, (run, bound) in _ANSWERS.items()}
)
