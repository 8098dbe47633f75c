"""GemmSpec: everything about a grouped GEMM that its tensors do not say, as text in operators' schemas."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import octavo_native
from octavo import QuantizerSpec
from octavo.formats import DType, Format
from octavo.quantizer import Scaling
from octavo.recipe_base import Gemm
from octavo_native.gemms import gemm_named, names_of
from octavo_registry.contract import GemmRequest, gemm_form

Tokens = Literal["none", "left", "right"]


@dataclass(frozen=True)
class GemmSpec:
    """One kind of the kernels' grouped GEMMs: fprop x w^T, dgrad dy w, wgrad dy^T x, left operand first.

    dtype         of unquantized operands, where `scaling` is None
    scaling ...   of quantized operands: the formats of the left and of the right one, square blocks of the weights,
                  or of x in wgrad, Hadamard data, whose groups are padded to 16 rows
    accumulate    of wgrad: the product is added to what `out` holds
    *_values      whether an operand comes as values instead of codes (octavo_native.layouts); of mxfp8 and nvfp4
    ctas          most CTAs of the CUDA kernel, each of which has a multiprocessor to itself; 0: one for each
    tokens        which of the operands is rows of tokens, unquantized or codes
    *_interleave  of wgrad: of dw's rows, which are the left operand's columns, or of its columns, which are the right
                  one's, two halves take turns in `out`, and so many stay together; 0: none take turns
    """

    gemm: Gemm
    dtype: DType = "bfloat16"
    scaling: Scaling | None = None
    left_format: Format = "e4m3"
    right_format: Format = "e4m3"
    right_square: bool = False
    hadamard: bool = False
    out_dtype: DType = "bfloat16"
    accumulate: bool = False
    fast_accumulation: bool = False
    left_square: bool = False
    left_values: bool = False
    right_values: bool = False
    ctas: int = 0
    tokens: Tokens = "none"
    left_interleave: int = 0
    right_interleave: int = 0


def quantized_gemm(
    gemm: Gemm, left: QuantizerSpec, right: QuantizerSpec, out_dtype: DType, fast_accumulation: bool, accumulate: bool
) -> GemmSpec:
    """The GEMM of operands that are quantized by these specs."""
    return GemmSpec(
        gemm=gemm,
        **names_of(gemm, left, right),
        out_dtype=out_dtype,
        accumulate=accumulate,
        # sums of blocks are promoted at each, whatever a recipe allows
        fast_accumulation=fast_accumulation and left.block_size is None,
    )


def gemm_spec(request: GemmRequest) -> GemmSpec:
    """The kernels' GEMM that a request asks for."""
    form, recipe = gemm_form(request.op, request.weight), request.recipe
    left, right = (recipe.quantizer(operand) for operand in form.operands)
    if left is None or right is None or not recipe.quantizes(request.op):
        return GemmSpec(gemm=form.kernel, dtype=request.in_dtype, out_dtype=request.out_dtype)
    fast = request.op in getattr(recipe, "fast_accumulation", ())
    return quantized_gemm(form.kernel, left, right, request.out_dtype, fast, accumulate=False)


def native_gemm(spec: GemmSpec) -> octavo_native.Gemm:
    """octavo_native's GEMM of `spec`, which takes its number of CTAs, and tokens, at each launch."""
    return gemm_named(**{name: value for name, value in vars(spec).items() if name not in ("ctas", "tokens")})


def gemm_text(spec: GemmSpec) -> str:
    """`spec` as JSON: operators' schemas take text."""
    return json.dumps(vars(spec))


@lru_cache(maxsize=1024)
def gemm_from(text: str) -> GemmSpec:
    """The spec that `gemm_text` wrote."""
    return GemmSpec(**json.loads(text))
