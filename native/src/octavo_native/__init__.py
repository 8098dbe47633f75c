"""Kernels of Octavo for CPUs and Hopper GPUs: grouped quantization, GEMMs and moved rows over addresses and a stream.

This is what backends are made of (octavo-torch-native, octavo-jax-native), not what a model calls. Arrays are passed as
addresses, kinds as numbers (`FORMATS["e4m3"]`); a CUDA call puts its work on the stream that it is given and neither
waits nor allocates. `layouts` has the shape of every array, `gemms` makes GEMMs from names, `support` says what the
kernels serve. Importing this package imports no framework and no numpy, and loads the compiled module only when one of
its names is used; `layouts` and `support` never need it.

Raises ValueError with the reason where arguments do not fit or this build cannot serve them, RuntimeError with the
CUDA runtime's text where a launch fails.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from octavo_native import layouts, support

if TYPE_CHECKING:
    from octavo_native import gemms
    from octavo_native._native import (
        ABI_LEVEL,
        ACTIVATIONS,
        DIRECTIONS,
        DTYPES,
        FORMATS,
        GATED,
        GEMMS,
        HAS_CUDA,
        LAYOUTS,
        NORMS,
        OPERANDS,
        PLACE_BITS,
        PROLOGUES,
        SCALINGS,
        SCORES,
        AdamWArrays,
        AdamWCodes,
        AdamWDraws,
        AdamWRule,
        Gemm,
        InputArgs,
        Logits,
        PlaneArgs,
        PrologueArgs,
        Quantizer,
        RouterRule,
        Sequence,
        adamw_step,
        build_info,
        choose_experts,
        choose_gradient,
        combine_rows,
        dot_rows,
        expand_mxfp4,
        ffi_plane_shapes,
        ffi_targets,
        interleave_halves,
        pack_e2m1,
        permute_rows,
        plan,
        plan_words,
        record_amax,
        route,
        route_workspace,
        swizzle_scales,
        update_scales,
    )
    from octavo_native.places import place

__version__ = "0.2.0"

__all__ = [
    "ABI_LEVEL",
    "ACTIVATIONS",
    "DIRECTIONS",
    "DTYPES",
    "FORMATS",
    "GATED",
    "GEMMS",
    "HAS_CUDA",
    "LAYOUTS",
    "NORMS",
    "OPERANDS",
    "PLACE_BITS",
    "PROLOGUES",
    "SCALINGS",
    "SCORES",
    "AdamWArrays",
    "AdamWCodes",
    "AdamWDraws",
    "AdamWRule",
    "Gemm",
    "InputArgs",
    "Logits",
    "PlaneArgs",
    "PrologueArgs",
    "Quantizer",
    "RouterRule",
    "Sequence",
    "adamw_step",
    "build_info",
    "choose_experts",
    "choose_gradient",
    "combine_rows",
    "dot_rows",
    "expand_mxfp4",
    "ffi_plane_shapes",
    "ffi_targets",
    "gemms",
    "interleave_halves",
    "layouts",
    "pack_e2m1",
    "permute_rows",
    "place",
    "plan",
    "plan_words",
    "record_amax",
    "route",
    "route_workspace",
    "support",
    "swizzle_scales",
    "update_scales",
]


if not TYPE_CHECKING:  # a type checker would take any name, misspelt ones too, for one of this module's

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "gemms":
            return import_module("octavo_native.gemms")
        module = import_module("octavo_native.places" if name == "place" else "octavo_native._native")
        value: object = getattr(module, name)
        globals()[name] = value  # later uses cost what those of an imported name do
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
