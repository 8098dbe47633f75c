"""NativeBackend: refuses what this machine or this build of the kernels cannot do, and binds functions to the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import octavo_native
from octavo.quantizer import Direction
from octavo.recipe_base import GEMMS
from octavo_native import support
from octavo_native.gathering import gathered_operands
from octavo_registry.contract import (
    AnyBound,
    AnyBoundFused,
    AnyBoundGemm,
    AnyBoundMove,
    AnyBoundRouter,
    AnyRequest,
    Backend,
    BoundActQuantize,
    BoundAdamWStep,
    BoundChooseExperts,
    BoundChooseGradient,
    BoundDactQuantize,
    BoundDequantize,
    BoundDgrad,
    BoundFprop,
    BoundNormQuantize,
    BoundQuantize,
    BoundWgrad,
    ChooseRequest,
    DequantizeRequest,
    FusedRequest,
    GemmRequest,
    MoveRequest,
    NormRequest,
    OptimizerRequest,
    PlanesRequest,
    QuantizeRequest,
    Weight,
    bound_move,
    gemm_form,
)
from octavo_torch.plugin_api import DTYPES, GroupedTensor, status_word

if TYPE_CHECKING:
    from octavo_registry.contract import KernelChoice

ABI_LEVEL = 2
"""The level of octavo-native's calls that this package makes."""

_SMS_OF_AN_H100 = 132


class NativeBackend(Backend):
    """Serves what its card admits, where octavo-native was built for the device."""

    def refuses(self, request: AnyRequest) -> str | None:
        """The reason why this machine or build cannot serve `request`: its ABI level, no CUDA kernels or no device; or
        why no build can."""
        cuda = request.device == "cuda"
        if refusal := support.abi_refusal(octavo_native.ABI_LEVEL, "octavo-torch-native", ABI_LEVEL):
            return refusal
        if request.op == "route" and (refusal := self.refuses_everywhere(request)):
            return refusal
        if refusal := support.build_refusal(cuda, octavo_native.HAS_CUDA):
            return refusal
        if cuda and not torch.cuda.is_available():
            return "device is cuda and this torch sees no CUDA device; install a CUDA build of torch or use the CPU"
        if refusal := self.refuses_everywhere(request):
            return refusal
        return _workspace_refusal(request) if isinstance(request, GemmRequest) else None

    def refuses_everywhere(self, request: AnyRequest) -> str | None:
        """The reason why no build of the kernels serves `request`: too many groups or experts, a layout of the other
        direction, a GEMM's sides or dtypes."""
        cuda = request.device == "cuda"
        if request.op == "route":
            return support.route_refusal(request.groups, cuda=cuda)
        if isinstance(request, ChooseRequest):
            return support.router_refusal(request.groups, request.choices, request.expert_groups)
        if isinstance(request, PlanesRequest) and not isinstance(request, DequantizeRequest):
            return support.layout_refusal(request.quantizer.directions, request.layouts)
        if isinstance(request, OptimizerRequest):
            return _codes_refusal(request)
        if isinstance(request, GemmRequest):
            dtypes = None if request.recipe.quantizes(request.op) else (request.in_dtype, request.other_dtype)
            return support.gemm_refusal(request.op, cuda=cuda, k=request.k, n=request.n, dtypes=dtypes)
        return None

    def bind(self, request: AnyRequest) -> AnyBound:
        """The function for `request.op`."""
        if request.device == "cuda":
            # created now: a word that is created while a graph is captured would be zeroed by every replay
            status_word(torch.device("cuda", torch.cuda.current_device()))
        if isinstance(request, GemmRequest):
            return _bind_gemm(request)
        if isinstance(request, MoveRequest):
            return _bind_move(request)
        if isinstance(request, ChooseRequest):
            return _bind_router(request)
        if isinstance(request, OptimizerRequest):
            from octavo_torch_native.optimizers.adamw import AdamWStep

            return BoundAdamWStep(AdamWStep(request.quantizer, request.layouts))
        if isinstance(request, QuantizeRequest):
            return _bind_quantize(request)
        if isinstance(request, DequantizeRequest):
            from octavo_torch_native.quantizers.dequantizer import Dequantizer

            return BoundDequantize(Dequantizer(DTYPES[request.out_dtype]))
        return _bind_fused(request)

    def kernels(self, request: GemmRequest, rows: int) -> tuple[KernelChoice, ...]:
        """The tiles in which the CUDA kernels can cut a GEMM of `rows` rows in equal groups, the chosen one first.

        Empty for other operations and devices, and where the request leaves k, n or groups open.
        """
        k, n, groups = request.k, request.n, request.groups
        if request.device != "cuda" or request.op not in GEMMS or k is None or n is None or groups is None:
            return ()
        from octavo_native.gemms import gemm_choices
        from octavo_registry.contract import KernelChoice
        from octavo_torch_native.gemm.spec import gemm_spec, native_gemm

        spec = gemm_spec(request)
        n, k = gemm_form(request.op, request.weight).sides(n, k)
        here = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
        sms = _SMS_OF_AN_H100 if here is None else here.multi_processor_count
        choices = gemm_choices(native_gemm(spec), rows=rows, n=n, k=k, groups=groups, sms=sms)
        return tuple(
            KernelChoice(choice.name, choice.tiles, choice.waves, choice.filled, choice.microseconds, choice.chosen)
            for choice in choices
        )


# The functions below import inside, because their modules use names that another ABI level may not have.


def _bind_gemm(request: GemmRequest) -> AnyBoundGemm:
    from octavo_native.gemms import LAYOUTS_OF_GEMM
    from octavo_torch_native.arrays.group_index import index_groups
    from octavo_torch_native.arrays.interleaving import interleave_halves
    from octavo_torch_native.arrays.recorder import Recorder
    from octavo_torch_native.gemm.gemm import Dgrad, Fprop, Wgrad
    from octavo_torch_native.gemm.spec import gemm_spec
    from octavo_torch_native.linear.recorded_layer import whole_layer

    spec = gemm_spec(request)
    weight = request.weight
    form = gemm_form(request.op, weight)
    layouts = form.renamed(LAYOUTS_OF_GEMM[form.kernel]) if spec.scaling else {}
    dtype, fast, cuda = request.out_dtype, spec.fast_accumulation, request.device == "cuda"
    if request.op == "fprop":
        fprop = Fprop(dtype, weight=weight, fast_accumulation=fast)
        limited = fprop.limited if cuda else None
        return BoundFprop(
            fprop, layouts=layouts, prepare=index_groups, whole_layer=whole_layer, recorder=Recorder, limited=limited,
            takes_tokens=gathered_operands(request, "x"), interleave_halves=interleave_halves,
        )  # fmt: skip
    if request.op == "dgrad":
        dgrad = Dgrad(dtype, weight=weight, fast_accumulation=fast)
        return BoundDgrad(
            dgrad, layouts=layouts, prepare=index_groups, limited=dgrad.limited if cuda else None,
            takes_tokens=gathered_operands(request, "dy"),
        )  # fmt: skip

    def wgrad(interleave: int = 0) -> BoundWgrad[Tensor, Any] | None:
        if interleave and support.joining_refusal(interleave, cuda=cuda):
            return None
        run = Wgrad(dtype, weight=weight, fast_accumulation=fast, interleave=interleave)
        return BoundWgrad(
            run, layouts=layouts, prepare=index_groups, limited=run.limited if cuda else None,
            takes_tokens=gathered_operands(request, "x", "dy"),
            interleaved=wgrad if spec.scaling and not interleave else None,
        )  # fmt: skip

    bound = wgrad()
    assert bound is not None  # of halves
    return bound


def _bind_quantize(request: QuantizeRequest) -> BoundQuantize[Tensor, GroupedTensor]:
    from octavo_torch_native.arrays.group_index import index_groups
    from octavo_torch_native.quantizers.delayed import record_amax, update_scales
    from octavo_torch_native.quantizers.quantizer import Quantizer
    from octavo_torch_native.quantizers.values import if_valued

    quantizer = Quantizer(request.quantizer, request.layouts, DTYPES[request.in_dtype])
    delayed = request.quantizer.scaling == "delayed"
    return BoundQuantize(
        quantizer,
        prepare=index_groups,
        with_amax=quantizer.with_amax,
        into=quantizer.into,
        from_plain=quantizer.from_plain,
        to_plain=quantizer.to_plain,
        of_tokens=quantizer.of_tokens,
        of_mxfp4=quantizer.of_mxfp4 if request.stacked else None,
        round_first=_round_first,
        interleaved=None
        if not request.stacked or _interleaving_refusal(request, 1)
        else partial(_interleaved, request),
        update_scales=update_scales if delayed else None,
        record_amax=record_amax if delayed else None,
        multiplied=if_valued(request, partial(_writing_values, request), of_array=True),
    )


def _writing_values(request: QuantizeRequest, directions: frozenset[Direction]) -> BoundQuantize[Tensor, GroupedTensor]:
    """A quantizer that writes planes of these directions as values where it can."""
    from octavo_torch_native.arrays.group_index import index_groups
    from octavo_torch_native.quantizers.quantizer import Quantizer
    from octavo_torch_native.quantizers.values import layouts_with_values

    rows, rows_of_tokens = (
        Quantizer(
            request.quantizer,
            layouts_with_values(request, directions, of_array=of_array),
            DTYPES[request.in_dtype],
        )
        for of_array in (True, False)
    )
    return BoundQuantize(rows, prepare=index_groups, of_tokens=rows_of_tokens.of_tokens)


def _interleaving_refusal(request: QuantizeRequest, block: int) -> str | None:
    spec = request.quantizer
    return support.interleaving_refusal(
        block, request.in_dtype, spec.scaling, cuda=request.device == "cuda", square=spec.square, mxfp4=bool(spec.mxfp4)
    )


def _interleaved(
    request: QuantizeRequest, block: int, weight: Weight, /
) -> BoundQuantize[Tensor, GroupedTensor] | None:
    """Kernels that quantize weights whose gate and up rows take turns; None where the front end gives halves."""
    from octavo_torch_native.arrays.group_index import index_groups
    from octavo_torch_native.quantizers.quantizer import Interleaving, Quantizer

    if _interleaving_refusal(request, block):
        return None
    turns: Interleaving = {"interleaved_rows": block} if weight == "nk" else {"interleaved_cols": block}
    quantizer = Quantizer(request.quantizer, request.layouts, DTYPES[request.in_dtype], **turns)
    # nothing asks for the amax of weights in blocks
    with_amax = None if request.quantizer.mxfp4 else quantizer.with_amax
    return BoundQuantize(quantizer, prepare=index_groups, with_amax=with_amax, into=quantizer.into)


def _round_first(request: QuantizeRequest) -> BoundQuantize[Tensor, GroupedTensor] | None:
    """Kernels that round on their way to the codes; None where the front end has to."""
    if support.rounding_refusal(request.quantizer.mxfp4, request.in_dtype):
        return None
    bound = _bind_quantize(request)
    # what a router chooses and what a file holds needs no rounding, and nothing asks for the amax of weights in blocks
    return replace(bound, with_amax=None, of_tokens=None, of_mxfp4=None, round_first=None)


def _bind_fused(request: FusedRequest) -> AnyBoundFused:
    from octavo_torch_native.arrays.group_index import index_groups
    from octavo_torch_native.quantizers.fused import ActQuantizer, DactQuantizer, NormQuantizer
    from octavo_torch_native.quantizers.values import if_valued, layouts_with_values

    spec = request.quantizer
    if isinstance(request, NormRequest):
        return BoundNormQuantize(NormQuantizer(spec, request.layouts, request.norm), prepare=index_groups)
    if request.op == "act_quantize":

        def act(directions: frozenset[Direction] = frozenset()) -> BoundActQuantize[Tensor, GroupedTensor]:
            layouts = layouts_with_values(request, directions, of_array=False)
            run = ActQuantizer(spec, layouts, request.activation)
            return BoundActQuantize(run, prepare=index_groups, values=run.values)

        return replace(act(), multiplied=if_valued(request, act, of_array=False))

    def dact(directions: frozenset[Direction] = frozenset()) -> BoundDactQuantize[Tensor, GroupedTensor]:
        layouts = layouts_with_values(request, directions, of_array=False)
        run = DactQuantizer(spec, layouts, request.activation)
        return BoundDactQuantize(run, prepare=index_groups, values=run.values)

    return replace(dact(), multiplied=if_valued(request, dact, of_array=False))


def _bind_move(request: MoveRequest) -> AnyBoundMove:
    from octavo_torch_native.moe import moves

    return bound_move(request.op, moves)


def _bind_router(request: ChooseRequest) -> AnyBoundRouter:
    from octavo_torch_native.moe import router

    if request.op == "choose_experts":
        return BoundChooseExperts(router.choose_experts)
    return BoundChooseGradient(router.choose_gradient)


def _codes_refusal(request: OptimizerRequest) -> str | None:
    """Why the kernel of a step does not write the codes that `request` asks for, or None."""
    spec = request.quantizer
    if spec is None:
        return None
    return support.layout_refusal(spec.directions, request.layouts) or support.step_refusal(
        spec.format, request.k, square=spec.square, mxfp4=spec.mxfp4 is not None
    )


def _workspace_refusal(request: GemmRequest) -> str | None:
    """What octavo_native refuses of the GEMM when it is asked for its workspace."""
    from octavo_torch_native.gemm.spec import gemm_spec, native_gemm

    cuda = request.device == "cuda"
    step = support.CUDA_MULTIPLE if cuda else 1
    n, k = gemm_form(request.op, request.weight).sides(request.n or step, request.k or step)
    sides = {"rows": 1, "n": n, "k": k, "groups": request.groups or 1}
    try:
        native_gemm(gemm_spec(request)).workspace_bytes(cuda=cuda, **sides)
    except ValueError as error:
        return str(error)
    return None
