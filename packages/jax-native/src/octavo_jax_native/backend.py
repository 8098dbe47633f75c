"""NativeBackend: refuses what this build of the kernels cannot do, binds the rest."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import octavo_native
from octavo_jax_native.ffi import targets
from octavo_native import support
from octavo_native.gathering import gathered_operands
from octavo_registry.contract import (
    AnyBound,
    AnyBoundGemm,
    AnyBoundMove,
    AnyBoundRouter,
    AnyRequest,
    Backend,
    BoundChooseExperts,
    BoundChooseGradient,
    BoundDequantize,
    BoundDgrad,
    BoundFprop,
    BoundWgrad,
    ChooseRequest,
    DequantizeRequest,
    GemmRequest,
    MoveRequest,
    OptimizerRequest,
    PlanesRequest,
    QuantizeRequest,
    Refused,
    bound_move,
    gemm_form,
)

if TYPE_CHECKING:
    from octavo_registry.contract import KernelChoice


class NativeBackend(Backend):
    """Serves what its card admits, where octavo-native has kernels for the device.

    Making one registers the kernels with XLA, once per process, unless they do not go with the JAX that is installed.
    """

    def __init__(self) -> None:
        self._refusal = targets.refusal()
        if self._refusal is None:
            targets.register()

    def refuses(self, request: AnyRequest) -> str | None:
        """Versions that do not go together, a build without CUDA kernels, and what is refused everywhere."""
        if self._refusal is not None:
            return self._refusal
        cuda = request.device == "cuda"
        if refusal := support.build_refusal(cuda, octavo_native.HAS_CUDA):
            return refusal
        return self.refuses_everywhere(request)

    def refuses_everywhere(self, request: AnyRequest) -> str | None:
        """A layout of the other direction, GEMMs whose sides or dtypes the CUDA kernels do not take, too many groups to
        count, and experts for a warp."""
        if isinstance(request, MoveRequest) and request.op == "route":
            return support.route_refusal(request.groups, cuda=request.device == "cuda")
        if isinstance(request, ChooseRequest):
            return support.router_refusal(request.groups, request.choices, request.expert_groups)
        if request.device == "cuda" and isinstance(request, GemmRequest):
            dtypes = None if _quantized(request) else (request.in_dtype, request.other_dtype)
            return support.gemm_refusal(request.op, cuda=True, k=request.k, n=request.n, dtypes=dtypes)
        if isinstance(request, PlanesRequest):
            return support.layout_refusal(request.quantizer.directions, request.layouts)
        return None

    def bind(self, request: AnyRequest) -> AnyBound:
        """The jitted function for `request`."""
        # here, because the modules below use names that another ABI level may not have
        from octavo_jax_native.quantizers.dequantizer import bind_dequantize
        from octavo_jax_native.quantizers.fused import bind_fused
        from octavo_jax_native.quantizers.quantizer import bind_quantize

        if isinstance(request, GemmRequest):
            return _bind_gemm(request)
        if isinstance(request, MoveRequest):
            return _bind_move(request)
        if isinstance(request, ChooseRequest):
            return _bind_router(request)
        if isinstance(request, OptimizerRequest):
            raise Refused(f"serves no {request.op}; its card does not name it")
        if isinstance(request, QuantizeRequest):
            return bind_quantize(request)
        if isinstance(request, DequantizeRequest):
            return BoundDequantize(bind_dequantize(request.out_dtype))
        return bind_fused(request)

    def kernels(self, request: GemmRequest, rows: int) -> tuple[KernelChoice, ...]:
        """The tiles in which a CUDA GEMM of M = `rows` could be cut, the chosen one first; () for other requests."""
        if self.refuses(request) is not None or request.device != "cuda":
            return ()
        from octavo_jax_native.gemm.tiles import kernel_choices

        return kernel_choices(request, rows)


def _bind_gemm(request: GemmRequest) -> AnyBoundGemm:
    from octavo_jax_native.gemm.gemm import bind_dgrad, bind_fprop, bind_wgrad
    from octavo_native.gemms import LAYOUTS_OF_GEMM

    cuda = request.device == "cuda"
    form = gemm_form(request.op, request.weight)
    layouts = form.renamed(LAYOUTS_OF_GEMM[form.kernel]) if _quantized(request) else {}
    if request.op == "fprop":
        return BoundFprop(
            bind_fprop(request),
            layouts=layouts,
            limited=partial(bind_fprop, request) if cuda else None,
            takes_tokens=gathered_operands(request, "x"),
        )
    if request.op == "dgrad":
        return BoundDgrad(
            bind_dgrad(request),
            layouts=layouts,
            limited=partial(bind_dgrad, request) if cuda else None,
            takes_tokens=gathered_operands(request, "dy"),
        )
    return BoundWgrad(
        bind_wgrad(request),
        layouts=layouts,
        limited=partial(bind_wgrad, request) if cuda else None,
        takes_tokens=gathered_operands(request, "x", "dy"),
    )


def _bind_move(request: MoveRequest) -> AnyBoundMove:
    from octavo_jax_native.moe import moves

    return bound_move(request.op, moves)


def _bind_router(request: ChooseRequest) -> AnyBoundRouter:
    from octavo_jax_native.moe import chooser

    if request.op == "choose_experts":
        return BoundChooseExperts(chooser.choose_experts)
    return BoundChooseGradient(chooser.choose_gradient)


def _quantized(request: GemmRequest) -> bool:
    return request.recipe.quantizes(request.op)
