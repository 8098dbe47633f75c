"""The requests of a grouped linear layer's operations, from the fprop request with the whole recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo import QuantizerSpec, Recipe
from octavo.formats import DType
from octavo.quantizer import Operand
from octavo.recipe_base import Gemm
from octavo_registry.contract.request import Request


@dataclass(frozen=True, slots=True)
class LayerDtypes:
    """What a layer's fprop request leaves open of its dtypes.

    wgrad     of dw; None: the recipe's, else x's
    dgrad     of dx; None: the recipe's output_dtype, else dy's
    w         of w; None: x's
    products  in which operands are that no slot quantizes: the front end casts them; None: each is in its own
    """

    wgrad: DType | None = None
    dgrad: DType | None = None
    w: DType | None = None
    products: DType | None = None


OWN_DTYPES = LayerDtypes()


def gemm_request(layer: Request, recipe: Recipe, gemm: Gemm, dtypes: LayerDtypes = OWN_DTYPES) -> Request:
    """The request of one GEMM of a layer, from the layer's fprop request with the whole recipe.

    y has the request's out_dtype, and so has dy.
    """
    w = dtypes.w or layer.in_dtype
    in_dtype, out_dtype, other = layer.in_dtype, layer.out_dtype, w
    if gemm == "dgrad":
        in_dtype, out_dtype = layer.out_dtype, dtypes.dgrad or recipe.output_dtype or layer.out_dtype
    elif gemm == "wgrad":
        out_dtype, other = dtypes.wgrad or recipe.wgrad_dtype or layer.in_dtype, layer.out_dtype
    if dtypes.products is not None and not recipe.quantizes(gemm):
        in_dtype = other = dtypes.products
    return replace(
        layer,
        op=gemm,
        recipe=recipe.for_gemm(gemm),
        quantizer=None,
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
    return QuantizerSpec(**{**dict(spec), "orientation": "rowwise"})


def quantize_request(
    layer: Request,
    spec: QuantizerSpec,
    operand: Operand,
    layouts: tuple[str, str],
    dtypes: LayerDtypes = OWN_DTYPES,
) -> Request:
    """The request of one operand's quantizer; `spec` and the (rowwise, columnwise) `layouts` are of w as it lies."""
    in_dtype = {"x": layer.in_dtype, "w": dtypes.w or layer.in_dtype, "dy": layer.out_dtype}[operand]
    rows, columns = layer.n, layer.k
    if operand == "dy" or (operand == "w" and layer.weight == "kn"):
        rows, columns = columns, rows
    return replace(
        layer,
        op="quantize",
        recipe=None,
        quantizer=spec,
        in_dtype=in_dtype,
        out_dtype=in_dtype,
        k=columns,
        n=rows if operand == "w" else None,
        stacked=operand == "w",
        layouts=layouts,
        weight="nk",
    )
