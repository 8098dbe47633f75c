"""The kernels as targets of XLA's custom calls: their names, and their registration, once per process."""

from __future__ import annotations

import threading

import jax
import jaxlib

import octavo_native
from octavo_native import support

ABI_LEVEL = 2
"""The level of octavo-native that this package is written for: numbers of enums, names and attributes of targets."""

OLDEST_JAXLIB = (0, 6, 2)
"""The first jaxlib with version 0.1 of XLA's FFI, which the kernels are built against."""

PLAN = "octavo_plan"
DEQUANTIZE = "octavo_dequantize"
CONVERT = "octavo_convert"
GEMM = "octavo_gemm"
CHOOSE = "octavo_choose"
CHOOSE_GRADIENT = "octavo_choose_gradient"
ROUTE = "octavo_route"
PERMUTE_ROWS = "octavo_permute_rows"
COMBINE_ROWS = "octavo_combine_rows"
DOT_ROWS = "octavo_dot_rows"

QUANTIZE = {
    scaling: f"octavo_quantize_{scaling}" for scaling in ("delayed", "current", "row", "block", "mxfp8", "nvfp4")
}
"""The target that quantizes, by scaling."""

TARGETS = (
    PLAN,
    *QUANTIZE.values(),
    DEQUANTIZE,
    CONVERT,
    GEMM,
    CHOOSE,
    CHOOSE_GRADIENT,
    ROUTE,
    PERMUTE_ROWS,
    COMBINE_ROWS,
    DOT_ROWS,
)
"""Every target's name: what `jax.export` must be told to let pass, as `DisabledSafetyCheck.custom_call(name)`."""

_lock = threading.Lock()
_registered: set[tuple[str, str]] = set()


def refusal() -> str | None:
    """Why the kernels that are installed cannot be handed to the JAX that is installed, or None."""
    if refused := support.abi_refusal(octavo_native.ABI_LEVEL, "octavo-jax-native", ABI_LEVEL):
        return refused
    version = jaxlib.version.__version_info__
    if version < OLDEST_JAXLIB:
        oldest = ".".join(map(str, OLDEST_JAXLIB))
        return f"jaxlib is {jaxlib.version.__version__}, the kernels need {oldest} or newer, which has XLA FFI 0.1"
    return None


def register() -> None:
    """Register every target for the platforms that the build of octavo-native has; later calls do nothing.

    Call it only where `refusal()` is None.
    """
    with _lock:
        for platform, handlers in octavo_native.ffi_targets().items():
            for name, capsule in handlers.items():
                if (platform, name) not in _registered:
                    jax.ffi.register_ffi_target(name, capsule, platform=platform, api_version=1)
                    _registered.add((platform, name))
