"""TritonBackend: refuses what this process or its Triton cannot do, binds the rest."""

from __future__ import annotations

from functools import partial

from octavo.grouped_tensor import PLAIN
from octavo_jax_triton.gemm.gemm import bind_dgrad, bind_fprop, bind_wgrad
from octavo_jax_triton.launch.arguments import Target
from octavo_jax_triton.quantizers.dequantizer import bind_dequantize, converted
from octavo_jax_triton.quantizers.quantizer import bind_quantize
from octavo_registry.contract import (
    AnyBound,
    AnyBoundGemm,
    AnyRequest,
    Backend,
    BoundDequantize,
    BoundDgrad,
    BoundFprop,
    BoundQuantize,
    BoundWgrad,
    DequantizeRequest,
    GemmRequest,
    QuantizeRequest,
    Refused,
    gemm_form,
)
from octavo_triton.kernels.device import INTERPRETED
from octavo_triton.layouts import kernels_refusal
from octavo_triton.products.spec import chip_of, layouts_of


class TritonBackend(Backend):
    """Serves what its card admits, on GPUs where Triton compiles and on CPUs where it interprets."""

    def refuses(self, request: AnyRequest) -> str | None:
        """Kernels that are interpreted where they shall be compiled, or vice versa; a Triton of another version."""
        if request.device == "cpu" and not INTERPRETED:
            return (
                "device is cpu, and Triton compiles for GPUs alone in this process; its interpreter, for tests, is "
                "switched on by TRITON_INTERPRET=1 before Triton is imported"
            )
        if request.device == "cuda":
            if INTERPRETED:
                return "TRITON_INTERPRET is set, so that Triton would interpret kernels on the CPU; unset it"
            # here, because jax-triton is not there where kernels are interpreted
            from octavo_jax_triton.launch import compiled

            if refusal := compiled.refusal():
                return refusal
        return self.refuses_everywhere(request)

    def refuses_everywhere(self, request: AnyRequest) -> str | None:
        """More groups than one program can sum; square blocks of columns of x; layouts that no quantizer here makes."""
        return kernels_refusal(request.groups, request.square_columns, request.quantizer, request.layouts)

    def bind(self, request: AnyRequest) -> AnyBound:
        """The jitted function for `request`."""
        target = Target(request.arch if request.device == "cuda" else None)
        if isinstance(request, GemmRequest):
            return _bind_gemm(request, target)
        if isinstance(request, QuantizeRequest):
            columnwise = request.layouts[1]
            return BoundQuantize(
                bind_quantize(request.quantizer, columnwise, target),
                from_plain=partial(converted, columnwise=columnwise, target=target),
                to_plain=partial(converted, columnwise=PLAIN, target=target),
            )
        if isinstance(request, DequantizeRequest):
            return BoundDequantize(bind_dequantize(request.out_dtype, target))
        raise Refused(f"serves no {request.op}; its card does not name it")


def _bind_gemm(request: GemmRequest, target: Target) -> AnyBoundGemm:
    if request.op == "fprop":
        return BoundFprop(bind_fprop(request, target), layouts=_layouts(request, target))
    if request.op == "dgrad":
        return BoundDgrad(bind_dgrad(request, target), layouts=_layouts(request, target))
    return BoundWgrad(bind_wgrad(request, target), layouts=_layouts(request, target))


def _layouts(request: GemmRequest, target: Target) -> dict[str, str]:
    """The layouts in which operands must arrive, where they are not plain, by the kernels' GEMM."""
    return layouts_of(gemm_form(request.op, request.weight).kernel, chip_of(target.arch), request.kind)
