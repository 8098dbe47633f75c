"""NativeBackend: refuses what this machine or this build of the kernels cannot do, binds the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import octavo_native
from octavo.recipe_base import GEMMS
from octavo_native import support
from octavo_registry.contract.cards import MOVES, QUANTIZERS
from octavo_registry.contract.request import Bound, Request
from octavo_torch.plugin_api import DTYPES, status_word

if TYPE_CHECKING:
    from octavo_registry.contract.kernels import KernelChoice

ABI_LEVEL = 1
"""The level of octavo-native's calls that this package makes."""

_ROUTED_GROUPS = 1024
_SMS_OF_AN_H100 = 132


class NativeBackend:
    """Serves what its card admits, where octavo-native was built for the device."""

    def refuses(self, request: Request) -> str | None:
        """Another ABI level, a build without CUDA, no device, a layout of the other direction, sides of a GEMM."""
        cuda = request.device == "cuda"
        if refusal := support.abi_refusal(octavo_native.ABI_LEVEL, "octavo-torch-native", ABI_LEVEL):
            return refusal
        if request.op == "route" and cuda and (request.groups or 1) > _ROUTED_GROUPS:
            return (
                f"groups is {request.groups}, and its cuda kernel, which counts the choices once a group, is slower "
                f"than a sort past {_ROUTED_GROUPS}"
            )
        if refusal := support.build_refusal(cuda, octavo_native.HAS_CUDA):
            return refusal
        if cuda and not torch.cuda.is_available():
            return "device is cuda and this torch sees no CUDA device; install a CUDA build of torch or use the CPU"
        if request.op in GEMMS:
            return _gemm_refusal(request)
        if request.op in QUANTIZERS and request.quantizer is not None:
            return support.layout_refusal(request.quantizer.directions, request.layouts)
        return None

    def bind(self, request: Request) -> Bound:
        """The function for `request.op`; see octavo_registry.Bound for the calls."""
        # here, because the modules below use names that another ABI level may not have
        from octavo_native.gemms import LAYOUTS_OF_GEMM
        from octavo_torch_native.arrays.rows import plan_rows
        from octavo_torch_native.gemm.gemm import BOUND
        from octavo_torch_native.gemm.product import product_of
        from octavo_torch_native.linear.whole import whole_layer
        from octavo_torch_native.moe import moves
        from octavo_torch_native.quantizers.delayed import update_scales
        from octavo_torch_native.quantizers.dequantizer import Dequantizer
        from octavo_torch_native.quantizers.fused import ActQuantizer, DactQuantizer, NormQuantizer
        from octavo_torch_native.quantizers.quantizer import Quantizer

        if request.device == "cuda":
            # made now: a word that is born while a graph is captured would be zeroed by every replay
            status_word(torch.device("cuda", torch.cuda.current_device()))
        if request.op in GEMMS:
            product = product_of(request)
            run = BOUND[request.op](request.out_dtype, fast_accumulation=product.fast_accumulation)
            return Bound(
                run=run,
                layouts=LAYOUTS_OF_GEMM[request.op] if product.scaling else {},
                prepare=plan_rows,
                whole_layer=whole_layer if request.op == "fprop" else None,
            )
        if request.op in MOVES:
            return Bound(run=getattr(moves, request.op))
        assert request.quantizer is not None  # part of the contract of the other operations
        if request.op == "dequantize":
            return Bound(run=Dequantizer(DTYPES[request.out_dtype]))
        if request.op == "norm_quantize":
            assert request.norm is not None
            return Bound(run=NormQuantizer(request.quantizer, request.layouts, request.norm), prepare=plan_rows)
        if request.op in ("act_quantize", "dact_quantize"):
            assert request.activation is not None
            fused = ActQuantizer if request.op == "act_quantize" else DactQuantizer
            return Bound(run=fused(request.quantizer, request.layouts, request.activation), prepare=plan_rows)
        quantizer = Quantizer(request.quantizer, request.layouts)
        delayed = request.quantizer.scaling == "delayed"
        return Bound(
            run=quantizer,
            prepare=plan_rows,
            run_with_amax=quantizer.with_amax if delayed else None,
            update_scales=update_scales if delayed else None,
        )

    def kernels(self, request: Request, rows: int) -> tuple[KernelChoice, ...]:
        """The tiles in which the CUDA kernels can cut a GEMM of `rows` rows in equal groups, the chosen one first.

        Empty for other operations and devices, and where the request leaves k, n or groups open.
        """
        k, n, groups = request.k, request.n, request.groups
        if request.device != "cuda" or request.op not in GEMMS or k is None or n is None or groups is None:
            return ()
        from octavo_native.gemms import gemm_choices, gemm_named
        from octavo_registry.contract.kernels import KernelChoice
        from octavo_torch_native.gemm.product import product_of

        product = product_of(request)
        here = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
        sms = _SMS_OF_AN_H100 if here is None else here.multi_processor_count
        choices = gemm_choices(gemm_named(**vars(product)), rows=rows, n=n, k=k, groups=groups, sms=sms)
        return tuple(
            KernelChoice(choice.name, choice.tiles, choice.waves, choice.filled, choice.microseconds, choice.chosen)
            for choice in choices
        )


def _gemm_refusal(request: Request) -> str | None:
    """What octavo_native refuses of the GEMM."""
    from octavo_native.gemms import gemm_named
    from octavo_torch_native.gemm.product import product_of

    recipe, cuda = request.recipe, request.device == "cuda"
    assert recipe is not None  # part of the contract of the GEMMs
    assert request.op in GEMMS
    product = product_of(request)
    dtypes = None if product.scaling else (request.in_dtype, request.other_dtype)
    if refusal := support.gemm_refusal(request.op, cuda=cuda, k=request.k, n=request.n, dtypes=dtypes):
        return refusal
    step = support.CUDA_MULTIPLE if cuda else 1
    sides = {"rows": 1, "n": request.n or step, "k": request.k or step, "groups": request.groups or 1}
    try:
        gemm_named(**vars(product)).workspace_bytes(cuda=cuda, **sides)
    except ValueError as error:
        return str(error)
    return None
