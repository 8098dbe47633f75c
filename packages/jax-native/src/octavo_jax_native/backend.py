"""NativeBackend: refuses what this build of the kernels cannot do, binds the rest."""

from __future__ import annotations

import octavo_native
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction
from octavo_jax_native import targets
from octavo_registry.request import Bound, Request

LAYOUTS: dict[Direction, tuple[str, str]] = {"rowwise": (PLAIN, "rows"), "columnwise": (PLAIN, "panels")}
"""The layouts that a plane may have."""


class NativeBackend:
    """Serves what its card admits, where octavo-native has kernels for the device.

    Making one registers the kernels with XLA, once a process, unless they do not go with the JAX that is installed.
    """

    def __init__(self) -> None:
        self._unfit = targets.refusal()
        if self._unfit is None:
            targets.register()

    def refuses(self, request: Request) -> str | None:
        """Versions that do not go together, a build without CUDA kernels, a layout of the other direction."""
        if self._unfit is not None:
            return self._unfit
        if request.device == "cuda" and not octavo_native.HAS_CUDA:
            return (
                "this octavo-native was built without CUDA kernels; install a build with them, or build it where "
                "nvcc is found (octavo doctor shows what was built)"
            )
        if request.quantizer is not None:
            for (direction, known), layout in zip(LAYOUTS.items(), request.layouts, strict=True):
                if direction in request.quantizer.directions and layout not in known:
                    return f"its {direction} data have layout {' or '.join(known)}, {layout} was asked for"
        return None

    def bind(self, request: Request) -> Bound:
        """The jitted function for `request`; see `octavo_registry.Bound` for the calls."""
        # here, because the modules below use names that another ABI level may not have
        from octavo_jax_native.dequantizing import bind_dequantize
        from octavo_jax_native.quantizing import bind_quantize

        if request.quantizer is None:
            raise ValueError(f"a {request.op} request names no quantizer; give Request.quantizer")
        if request.op == "dequantize":
            return Bound(bind_dequantize(request.out_dtype))
        return Bound(bind_quantize(request.quantizer, request.layouts))
