"""NativeBackend: refuses what this machine or this build of the kernels cannot do, binds the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import octavo_native
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction
from octavo.recipe_base import GEMMS
from octavo_registry.contract.cards import MOVES, QUANTIZERS
from octavo_registry.contract.request import Bound, Request
from octavo_torch.plugin_api import DTYPES, status_word
from octavo_torch_native.plugin import PANELS, ROWS

if TYPE_CHECKING:
    from octavo_registry.contract.kernels import KernelChoice

ABI_LEVEL = 1
"""The level of octavo-native's calls that this package makes."""

LAYOUTS: dict[Direction, tuple[str, str]] = {"rowwise": (PLAIN, ROWS), "columnwise": (PLAIN, PANELS)}
"""The layouts that a plane may have."""

_CUDA_SIDES = 16
_ROUTED_GROUPS = 1024
_SMS_OF_AN_H100 = 132


class NativeBackend:
    """Serves what its card admits, where octavo-native was built for the device."""

    def refuses(self, request: Request) -> str | None:
        """Another ABI level, a build without CUDA, no device, a layout of the other direction, sides of a GEMM."""
        if octavo_native.ABI_LEVEL != ABI_LEVEL:
            return (
                f"octavo-native has ABI level {octavo_native.ABI_LEVEL} and octavo-torch-native calls level "
                f"{ABI_LEVEL}; install releases of both that belong together"
            )
        if request.op == "route" and request.device == "cuda" and (request.groups or 1) > _ROUTED_GROUPS:
            return (
                f"groups is {request.groups}, and its cuda kernel, which counts the choices once a group, is slower "
                f"than a sort past {_ROUTED_GROUPS}"
            )
        if request.device == "cuda":
            if not octavo_native.HAS_CUDA:
                return (
                    "this octavo-native was built without CUDA kernels; install a build with them, or build it where "
                    "nvcc is found (octavo doctor shows what was built)"
                )
            if not torch.cuda.is_available():
                return "device is cuda and this torch sees no CUDA device; install a CUDA build of torch or use the CPU"
        if request.op in QUANTIZERS and request.quantizer is not None:
            for (direction, known), layout in zip(LAYOUTS.items(), request.layouts, strict=True):
                if direction in request.quantizer.directions and layout not in known:
                    return f"makes {direction} data in layouts {' and '.join(known)}, {layout} was asked for"
        if request.op in GEMMS:
            return _gemm_refusal(request)
        return None

    def bind(self, request: Request) -> Bound:
        """The function for `request.op`; see octavo_registry.Bound for the calls."""
        # here, because the modules below use names that another ABI level may not have
        from octavo_native.gemms import LAYOUTS_OF_GEMM
        from octavo_torch_native.arrays.group_index import index_groups
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
                prepare=index_groups,
                whole_layer=whole_layer if request.op == "fprop" else None,
            )
        if request.op in MOVES:
            return Bound(run=getattr(moves, request.op))
        assert request.quantizer is not None  # part of the contract of the other operations
        if request.op == "dequantize":
            return Bound(run=Dequantizer(DTYPES[request.out_dtype]))
        if request.op == "norm_quantize":
            assert request.norm is not None
            return Bound(run=NormQuantizer(request.quantizer, request.layouts, request.norm), prepare=index_groups)
        if request.op in ("act_quantize", "dact_quantize"):
            assert request.activation is not None
            fused = ActQuantizer if request.op == "act_quantize" else DactQuantizer
            return Bound(run=fused(request.quantizer, request.layouts, request.activation), prepare=index_groups)
        quantizer = Quantizer(request.quantizer, request.layouts)
        return Bound(
            run=quantizer,
            prepare=index_groups,
            run_with_amax=quantizer.with_amax,
            update_scales=update_scales if request.quantizer.scaling == "delayed" else None,
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
    """What octavo_native refuses of the GEMM, and on CUDA operands of two dtypes."""
    from octavo_native.gemms import gemm_named
    from octavo_torch_native.gemm.product import product_of

    recipe, cuda = request.recipe, request.device == "cuda"
    assert recipe is not None  # part of the contract of the GEMMs
    step = _CUDA_SIDES if cuda else 1
    for name, side in (("k", request.k), ("n", request.n)):
        if side is not None and (side < 1 or side % step):
            return f"{name} is {side}, and its {request.device} GEMMs take multiples of {step} from {step} on"
    if cuda and request.other_dtype not in (None, request.in_dtype):
        first, other = ("dy", "w") if request.op == "dgrad" else ("x", "dy")
        return (
            f"{first} is {request.in_dtype} and {other} {request.other_dtype}; its cuda GEMMs multiply unquantized "
            "operands of one dtype"
        )
    product = product_of(request)
    sides = {"rows": 1, "n": request.n or step, "k": request.k or step, "groups": request.groups or 1}
    try:
        gemm_named(**vars(product)).workspace_bytes(cuda=cuda, **sides)
    except ValueError as error:
        return str(error)
    return None
