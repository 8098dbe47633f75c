"""Octavo's native kernels for JAX, through XLA's FFI: the backend "jax-native", and fused functions.

Importing this package imports neither JAX nor the kernels; the first use of a public name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_jax.functions.composed import Extras
    from octavo_jax_native.ffi.targets import TARGETS
    from octavo_jax_native.quantizers.functional import act_quantize, dact_quantize, norm_quantize

__version__ = "0.1.0"

__all__ = ["TARGETS", "Extras", "act_quantize", "dact_quantize", "norm_quantize"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "TARGETS":
        from octavo_jax_native.ffi.targets import TARGETS

        return TARGETS
    from octavo_jax_native.quantizers import functional

    value: object = getattr(functional, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
