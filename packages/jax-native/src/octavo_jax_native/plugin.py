"""The card of "jax-native". Imports neither JAX nor the kernels: `octavo_load` does, at first use."""

from __future__ import annotations

from typing import Any

from octavo.formats import DType
from octavo_registry.contract import QUANTIZERS, Backend, BackendCard, Capability, Op, Weight, hookimpl

NAME = "jax-native"

_EMULATED = "bf16 products of exact dequantized copies"
"""How the GEMMs of a recipe are computed whose formats Hopper has no instructions for."""

_EMULATED_RECIPES = frozenset({"mxfp8", "nvfp4"})

_FP8_RECIPES = frozenset({"delayed", "current", "row", "block"})
_QUANTIZED = _FP8_RECIPES | _EMULATED_RECIPES
_HIGH_PRECISION = frozenset({"high_precision"})
_QUANTIZE: frozenset[Op] = QUANTIZERS | {"dequantize"}
_GEMMS: frozenset[Op] = frozenset({"fprop", "dgrad", "wgrad"})
_HALVES: frozenset[DType] = frozenset({"bfloat16", "float16"})
_WEIGHTS: frozenset[Weight] = frozenset({"nk", "kn"})
_LAYOUTS = frozenset({"plain", "rows", "panels"})  # octavo_native.layouts says what the last two are


def _row(ops: frozenset[Op], recipes: frozenset[str], device: str = "cpu", **conditions: Any) -> Capability:
    return Capability(ops=ops, recipes=recipes, framework="jax", device=device, graph_safe=True, **conditions)


def _on_hopper(ops: frozenset[Op], recipes: frozenset[str], **conditions: Any) -> Capability:
    return _row(ops, recipes, "cuda", min_arch=(9, 0), max_arch=(9, 0), **conditions)


CARD = BackendCard(
    name=NAME,
    api_level=5,
    priority=100,
    needs=("jax>=0.10.2", "octavo-native>=0.1"),
    summary="quantizers and grouped GEMMs of every recipe as compiled kernels, for CPUs and for Hopper GPUs",
    capabilities=(
        _row(_QUANTIZE, _QUANTIZED, layouts=_LAYOUTS),
        _row(_GEMMS, _QUANTIZED | _HIGH_PRECISION, weights=_WEIGHTS),
        _on_hopper(_QUANTIZE, _QUANTIZED, layouts=_LAYOUTS),
        _on_hopper(_GEMMS, _HIGH_PRECISION, weights=_WEIGHTS, in_dtypes=_HALVES, accumulation="hopper_bf16"),
        _on_hopper(_GEMMS, _FP8_RECIPES, weights=_WEIGHTS, accumulation="hopper_fp8"),
        _on_hopper(_GEMMS, _EMULATED_RECIPES, weights=_WEIGHTS, accumulation="hopper_bf16", emulated=_EMULATED),
    ),
)


@hookimpl
def octavo_backends() -> tuple[BackendCard, ...]:
    """The native backend alone."""
    return (CARD,)


@hookimpl
def octavo_load(name: str) -> Backend | None:
    """The native backend, which imports JAX and the kernels and hands these to XLA."""
    if name != NAME:
        return None
    from octavo_jax_native.backend import NativeBackend

    return NativeBackend()
