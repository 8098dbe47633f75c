"""Octavo's native backend for PyTorch: grouped GEMMs, and quantization fused with what comes before it.

Importing this package imports no torch: a registry that only reads the backend's card (`octavo_torch_native.plugin`)
pays nothing for it. The first use of a public name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_torch_native.arrays.rows import RowPlan
    from octavo_torch_native.quantizers.functional import (
        act_quantize,
        convert,
        dact_quantize,
        dequantize,
        group_amax,
        norm_quantize,
        plan,
        quantize,
    )
    from octavo_torch_native.quantizers.quantized import Quantized

__version__ = "0.1.0"

__all__ = [
    "Quantized",
    "RowPlan",
    "act_quantize",
    "convert",
    "dact_quantize",
    "dequantize",
    "group_amax",
    "norm_quantize",
    "plan",
    "quantize",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from octavo_torch_native.quantizers import functional

    # all at once: afterwards every name is a plain global, which a compiler can trace
    globals().update({public: value for public, value in vars(functional).items() if public in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
