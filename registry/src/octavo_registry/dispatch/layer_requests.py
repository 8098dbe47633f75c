"""The requests of a grouped linear layer's operations, from the fprop request with the whole recipe."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from octavo import QuantizerSpec, Recipe
from octavo.formats import DType
from octavo.quantizer import Operand
from octavo.recipe_base import Gemm
from octavo_registry.contract.cards import Activated, Activation, Norm
from octavo_registry.contract.request import (
    ActivationRequest,
    DequantizeRequest,
    GemmRequest,
    NormRequest,
    QuantizeRequest,
    Request,
)


@dataclass(frozen=True, slots=True)
class LayerDtypes:
    """What a layer's fprop request leaves open of its dtypes.

    wgrad     of dw; None: the recipe's, else x's
    dgrad     of dx; None: x's
    w         of w; None: x's
    products  of operands that no slot quantizes, because the front end casts them; None: each has its own
    """

    wgrad: DType | None = None
    dgrad: DType | None = None
    w: DType | None = None
    products: DType | None = None


OWN_DTYPES = LayerDtypes()

ACTIVATED: tuple[Activated, ...] = get_args(Activated)


def gemm_request(layer: GemmRequest, recipe: Recipe, gemm: Gemm, dtypes: LayerDtypes = OWN_DTYPES) -> GemmRequest:
    """The request of one GEMM of a layer, from the layer's fprop request with the whole recipe.

    y has the request's out_dtype, and so has dy.
    """
    w = dtypes.w or layer.in_dtype
    in_dtype, out_dtype, other = layer.in_dtype, layer.out_dtype, w
    if gemm == "dgrad":
        in_dtype, out_dtype = layer.out_dtype, dtypes.dgrad or layer.in_dtype
    elif gemm == "wgrad":
        out_dtype, other = dtypes.wgrad or recipe.wgrad_dtype or layer.in_dtype, layer.out_dtype
    if dtypes.products is not None and not recipe.quantizes(gemm):
        in_dtype = other = dtypes.products
    return replace(
        layer,
        op=gemm,
        recipe=recipe.for_gemm(gemm),
        in_dtype=in_dtype,
        out_dtype=out_dtype,
        other_dtype=None if recipe.quantizes(gemm) or other == in_dtype else other,
    )


def operand_spec(recipe: Recipe, operand: Operand, training: bool) -> QuantizerSpec | None:
    """How `operand` is quantized, in the planes that the layer's GEMMs read of w as [G, N, K]; None: not at all."""
    spec = recipe.quantizer(operand)
    if training or spec is None:
        return spec
    if operand == "dy" or not recipe.quantizes("fprop"):
        return None
    return spec.with_orientation("rowwise")


def quantize_request(
    layer: GemmRequest,
    spec: QuantizerSpec,
    operand: Operand,
    layouts: tuple[str, str],
    dtypes: LayerDtypes = OWN_DTYPES,
) -> QuantizeRequest:
    """The request of one operand's quantizer; `spec` and the (rowwise, columnwise) `layouts` are of w as it lies."""
    in_dtype = {"x": layer.in_dtype, "w": dtypes.w or layer.in_dtype, "dy": layer.out_dtype}[operand]
    rows, columns = layer.n, layer.k
    if operand == "dy" or (operand == "w" and layer.weight == "kn"):
        rows, columns = columns, rows
    of_operand = {
        "op": "quantize",
        "in_dtype": in_dtype,
        "out_dtype": in_dtype,
        "k": columns,
        "n": rows if operand == "w" else None,
    }
    return QuantizeRequest(**common_fields(layer) | of_operand, quantizer=spec, layouts=layouts, stacked=operand == "w")


def common_fields(request: Request) -> dict[str, Any]:
    """The fields that every request has, by name."""
    return {part.name: getattr(request, part.name) for part in fields(Request)}


def _planes_fields(quantize: QuantizeRequest) -> dict[str, Any]:
    return {**common_fields(quantize), "quantizer": quantize.quantizer, "layouts": quantize.layouts}


def activation_request(quantize: QuantizeRequest, op: Activated, activation: Activation) -> ActivationRequest:
    """The request of the same quantizer, fused with an activation or its gradient."""
    return ActivationRequest(**_planes_fields(quantize) | {"op": op, "activation": activation})


def norm_request(quantize: QuantizeRequest, norm: Norm) -> NormRequest:
    """The request of the same quantizer, fused with a normalization."""
    return NormRequest(**_planes_fields(quantize) | {"op": "norm_quantize", "norm": norm})


def dequantize_request(quantize: QuantizeRequest) -> DequantizeRequest:
    """The request to dequantize what the quantizer makes."""
    return DequantizeRequest(**_planes_fields(quantize) | {"op": "dequantize"})
