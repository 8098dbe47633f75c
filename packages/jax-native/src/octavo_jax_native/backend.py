"""NativeBackend: refuses what this build of the kernels cannot do, binds the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import octavo_native
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction
from octavo.recipe_base import GEMMS
from octavo_jax_native.ffi import targets
from octavo_jax_native.plugin import EMULATED, EMULATED_RECIPES
from octavo_registry.contract.request import Bound, Request

if TYPE_CHECKING:
    from octavo_registry.contract.kernels import KernelChoice

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
        """Versions that do not go together, a build without CUDA kernels, a layout of the other direction, and GEMMs
        whose sides or dtypes the CUDA kernels do not take."""
        if self._unfit is not None:
            return self._unfit
        if request.device == "cuda" and not octavo_native.HAS_CUDA:
            return (
                "this octavo-native was built without CUDA kernels; install a build with them, or build it where "
                "nvcc is found (octavo doctor shows what was built)"
            )
        if request.device == "cuda" and request.op in GEMMS:
            from octavo_jax_native.ffi.gemm import cuda_refusal

            if request.other_dtype not in (None, request.in_dtype):
                first, other = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("x", "dy")}[request.op]
                return (
                    f"its CUDA kernels multiply unquantized operands of one dtype, {first} is {request.in_dtype} and "
                    f"{other} {request.other_dtype}"
                )
            return cuda_refusal(None if _quantized(request) else request.in_dtype, request.n, request.k)
        if request.quantizer is not None:
            for (direction, known), layout in zip(LAYOUTS.items(), request.layouts, strict=True):
                if direction in request.quantizer.directions and layout not in known:
                    return f"its {direction} data have layout {' or '.join(known)}, {layout} was asked for"
        return None

    def bind(self, request: Request) -> Bound:
        """The jitted function for `request`; see `octavo_registry.Bound` for the calls."""
        # here, because the modules below use names that another ABI level may not have
        from octavo_jax_native.gemm.gemm import bind_gemm
        from octavo_jax_native.quantizers.dequantizer import bind_dequantize
        from octavo_jax_native.quantizers.fused import bind_fused
        from octavo_jax_native.quantizers.quantizer import bind_quantize

        if request.op in GEMMS:
            emulated = request.device == "cuda" and request.kind in EMULATED_RECIPES
            return Bound(
                bind_gemm(request),
                layouts=_layouts(request) if _quantized(request) else {},
                note=f"emulated: {EMULATED}" if emulated else "",
            )
        if request.quantizer is None:
            raise ValueError(f"a {request.op} request names no quantizer; give Request.quantizer")
        if request.op == "dequantize":
            return Bound(bind_dequantize(request.out_dtype))
        if request.op != "quantize":
            return Bound(bind_fused(request))
        run, run_with_amax = bind_quantize(request.quantizer, request.layouts)
        return Bound(run, run_with_amax=run_with_amax)

    def kernels(self, request: Request, rows: int) -> tuple[KernelChoice, ...]:
        """The tiles in which a CUDA GEMM of M = `rows` could be cut, the chosen one first; () for other requests."""
        if self.refuses(request) is not None or request.device != "cuda" or request.op not in GEMMS:
            return ()
        from octavo_jax_native.gemm.tiles import kernel_choices

        return kernel_choices(request, rows)


def _layouts(request: Request) -> dict[str, str]:
    """The native layout of the plane that a GEMM reads of each operand."""
    from octavo_jax_native.arrays.planes import NATIVE
    from octavo_jax_native.gemm.orientation import form_of

    assert request.op in GEMMS
    form = form_of(request.op, request.weight)
    return {name: NATIVE[direction] for name, direction in zip(form.operands, form.directions, strict=True)}


def _quantized(request: Request) -> bool:
    return request.recipe is not None and request.op in GEMMS and request.recipe.quantizes(request.op)
