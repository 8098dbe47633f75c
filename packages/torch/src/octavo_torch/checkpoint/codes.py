"""Quantized weights as tensors of a file, and back: codes and scales are stored, and never quantized again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo import GroupedTensorSpec, OctavoError
from octavo.grouped_tensor import PLAIN
from octavo_torch.arrays.dtypes import DTYPE_NAMES, DTYPES
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.interleaving import to_halves
from octavo_torch.distributed.fsdp.codes import reads_plain, whole_layer
from octavo_torch.distributed.fsdp.planes import from_planes, plane_names, plane_shape
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.mlp.packed_weight import PackedWeight
from octavo_torch.quantizers.functional import quantize
from octavo_torch.scaling.recipe_module import RecipeModule

_NAN_BYTE = {"e8m0": 0xFF, "e4m3": 0x7F}


def codes_of(layer: RecipeModule, weight: Tensor, number: int) -> GroupedTensor | None:
    """Plain planes of a layer's weight as the next forward reads it; None where fprop reads values.

    number   0 for the weight of the layer's first GEMM, 1 for that of a second one
    """
    spec = layer.recipe.quantizer("w")
    if spec is None or not layer.recipe.quantizes("fprop"):
        return None
    if isinstance(weight, CodedWeight):
        if weight.layouts == (PLAIN, PLAIN):
            return weight.codes
        plan = whole_layer(layer.recipe, _like(weight), weight.shape, layer.backend).quantizers["w"]
        if plan.bound.to_plain is None:
            raise ValueError(
                f"{plan.backend} holds weights in layouts {weight.layouts} and cannot convert them to plain codes; "
                "create the module with another backend="
            )
        plain: GroupedTensor = plan.bound.to_plain(weight.codes)
        return plain
    if block := interleave_of(layer, number):
        weight = to_halves(weight, block)
    scale = layer.delayed_states[number].encode_scale("w") if layer.recipe.stateful else None
    return quantize(weight.detach(), spec, scale=scale, backend=layer.backend)


def check_not_packed(module: nn.Module) -> None:
    """ValueError where a weight is a PackedWeight, which has nothing but the bytes of the file that it came from."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, PackedWeight):
            raise ValueError(
                f"{name} is MXFP4 alone, as in the file that it was loaded from; write the other tensors of "
                "state_dict(), or load that file with weights='codes'"
            )


def interleave_of(layer: RecipeModule, number: int) -> int:
    """Rows per block where gate and up rows are interleaved in the weight, else 0."""
    return getattr(layer, "interleave", None) or 0 if number == 0 else 0


def weight_of(layer: RecipeModule, codes: GroupedTensor, dtype: torch.dtype, number: int) -> CodedWeight:
    """The layer's parameter with these plain planes, in the layouts that its backend reads."""
    like = torch.empty((), dtype=dtype, device=codes.device)
    whole = whole_layer(layer.recipe, like, codes.shape, layer.backend)
    if not reads_plain(whole):
        plan = whole.quantizers["w"]
        convert = plan.bound.from_plain
        if convert is None:
            raise ValueError(
                f"{plan.backend} reads weights in layouts {whole.w_layouts} and produces them from "
                "values only; create the module with another backend="
            )
        codes = convert(codes)
    return CodedWeight(codes, layer.recipe, dtype, interleave_of(layer, number))


@torch.no_grad()
def write_into(parameter: CodedWeight, weight: CodedWeight) -> None:
    """Write the codes of `weight` into a parameter, which stays the same object: an optimizer may hold it."""
    if parameter.codes.spec != weight.codes.spec:  # in layouts of another backend than the present one
        parameter.data = weight
    parameter.copy_(weight)


def to_tensors(name: str, codes: GroupedTensor) -> dict[str, Tensor]:
    """The planes by name; shared planes appear once."""
    payloads, scales = plane_names(codes.spec.quantizer)
    return {f"{name}.{plane}": getattr(codes, plane).contiguous() for plane in (*payloads, *scales)}


def describe(codes: GroupedTensor, dtype: torch.dtype, interleave: int) -> dict[str, object]:
    """The JSON value that a file holds for a quantized weight in addition to its planes."""
    return {"spec": codes.spec.model_dump(mode="json"), "dtype": DTYPE_NAMES[dtype], "interleave": interleave}


def from_tensors(name: str, entry: Any, tensors: Mapping[str, Tensor]) -> tuple[GroupedTensor, torch.dtype]:
    """The inverse of `to_tensors` and `describe`; raises ValueError where something does not fit."""
    try:
        spec, dtype = GroupedTensorSpec(**entry["spec"]), DTYPES[entry["dtype"]]
    except (KeyError, TypeError, ValueError, OctavoError) as error:
        raise ValueError(f"the checkpoint's description of {name} cannot be read: {error}; save it again") from None
    payloads, scales = plane_names(spec.quantizer)
    planes: dict[str, Tensor] = {}
    for plane in (*payloads, *scales):
        value = tensors.get(f"{name}.{plane}")
        needed, kind = plane_shape(spec, plane)
        if value is None or tuple(value.shape) != needed or value.dtype is not kind:
            stored = "missing" if value is None else f"{value.dtype} {list(value.shape)}"
            raise ValueError(f"{name}.{plane} is {stored} in the checkpoint, and its spec says {kind} {list(needed)}")
        if plane not in payloads:
            kind_of = "fp32" if plane.endswith("_global") else spec.quantizer.scale_format
            check_scales(f"{name}.{plane}", value, kind_of)
        planes[plane] = value
    return from_planes(spec, planes), dtype


def check_scales(name: str, value: Tensor, kind: str) -> None:
    """Raises ValueError for scales that finite values cannot have: not positive, infinite or NaN.

    NVFP4's block scales may be zero; E8M0 has no sign.
    """
    if kind == "fp32":
        invalid = ~(value.isfinite() & (value > 0))
    elif kind == "e8m0":
        invalid = value == _NAN_BYTE[kind]
    else:
        invalid = value.view(torch.uint8) >= _NAN_BYTE[kind]
    if invalid.any():
        index = invalid.nonzero()[0].tolist()
        number = value[tuple(index)].item()
        raise ValueError(f"{name}{index or ''} is {number} in the checkpoint, which is not a scale of finite values")


def _like(weight: CodedWeight) -> Tensor:
    return torch.empty((), dtype=weight.dtype, device=weight.device)
