"""The fused quantizers that the suite tries: activations, their gradients and norms in front of quantizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo_conformance.cards.variants import DTYPES, RAGGED, FusedVariant
from octavo_registry.contract.cards import ALL_ACTIVATIONS, ALL_NORMS

_ONE_PER_SCALING = (
    *("delayed.e4m3", "current.e4m3", "row.e4m3.pow2", "block.e4m3.pow2", "mxfp8.e4m3"),
    "nvfp4.stochastic.hadamard",
)


def of_activations(full: bool) -> list[FusedVariant]:
    """Every activation in front of MXFP8 in bf16, and SwiGLU in front of three other quantizers in fp32; in the full
    selection every activation in front of one quantizer per scaling, in every dtype."""
    quick = ("delayed.e4m3", "block.e4m3.pow2", "nvfp4.stochastic.hadamard")
    return _full(ALL_ACTIVATIONS) if full else _quick(ALL_ACTIVATIONS, "swiglu", quick)


def of_gradients(full: bool) -> list[FusedVariant]:
    """The same for gradients of activations, with SwiGLU's in front of one other quantizer."""
    return _full(ALL_ACTIVATIONS) if full else _quick(ALL_ACTIVATIONS, "swiglu", ("delayed.e5m2",))


def of_norms(full: bool) -> list[FusedVariant]:
    """Both norms in front of MXFP8 in bf16, and RMSNorm in front of one other quantizer in fp32; in the full selection
    both in front of one quantizer per scaling, in every dtype."""
    return _full(ALL_NORMS) if full else _quick(ALL_NORMS, "rms", ("row.e4m3.pow2",))


def one_gradient(full: bool) -> list[FusedVariant]:
    """One activation in front of one quantizer."""
    return of_gradients(False)[:1]


def _full(functions: Iterable[Any]) -> list[FusedVariant]:
    return [
        FusedVariant(name, RAGGED[name], dtype, function=function)
        for dtype in DTYPES
        for name in _ONE_PER_SCALING
        for function in sorted(functions)
    ]


def _quick(functions: Iterable[Any], usual: str, others: tuple[str, ...]) -> list[FusedVariant]:
    """Each function in front of MXFP8 in bf16, and the usual one in front of the `others` in fp32."""
    mxfp8 = RAGGED["mxfp8.e4m3"]
    each = [FusedVariant("mxfp8.e4m3", mxfp8, "bfloat16", function=function) for function in sorted(functions)]
    return [*each, *(FusedVariant(name, RAGGED[name], "float32", function=usual) for name in others)]
