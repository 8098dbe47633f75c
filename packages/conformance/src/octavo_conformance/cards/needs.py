"""How a test states the capability it needs: never a vendor, always an operation, a recipe and conditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pytest

from octavo_conformance.cards.variants import Variant

Needed = Literal[
    "quantize", "dequantize", "act_quantize", "dact_quantize", "norm_quantize", "gemm", "layer",
    "route", "permute_rows", "combine_rows", "dot_rows", "choose_experts", "choose_gradient", "adamw_step",
]  # fmt: skip
Over = Callable[[bool], Sequence[Variant]]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Need:
    """What one test needs.

    op          "quantize", "dequantize" or a fused quantizer of a variant's spec; "gemm": the GEMM of a variant;
                "layer": every quantization and GEMM of a variant's recipe; or one of octavo_registry's MOVES,
                ROUTERS or OPTIMIZERS
    over        the variants that the test is tried on, from the quick (False) or the full (True) selection
    conditions  fields of `Request` that must hold besides: `sizes="device"`, `graph_safe=True`, ...
    rest        `over` is empty: the session adds what the card declares and no other test of `op` has
    """

    op: Needed
    over: Over
    conditions: Mapping[str, Any]
    rest: bool = False


def needs(op: Needed, over: Over, **conditions: Any) -> Callable[[Function], Function]:
    """Mark a test that takes `case`: it is tried on each variant and skipped where the card does not declare it."""
    mark = pytest.mark.octavo_needs(Need(op, over, conditions))

    def decorate(function: Function) -> Function:
        mark(function)
        return function

    return decorate


def needs_the_rest(op: Needed) -> Callable[[Function], Function]:
    """Mark a test that takes `case`: it is tried on what a card declares of `op` and the selection has nowhere else."""
    mark = pytest.mark.octavo_needs(Need(op, lambda full: (), {}, rest=True))

    def decorate(function: Function) -> Function:
        mark(function)
        return function

    return decorate
