"""Rows of a router's choices that are never written: quantizers and GEMMs read the tokens instead."""

from __future__ import annotations

from typing import Literal

from octavo.quantizer import Operand
from octavo.recipe_base import READERS, Gemm
from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.quantizer_plans import of_one_matrix

Read = Literal["rows", "tokens", "codes of rows", "codes of tokens"]
"""What a GEMM reads as the rows that choices make of x, or of dy:

rows              rows, which are written first, or codes that are quantized from these
tokens            the tokens, from which it gathers rows in high precision
codes of rows     codes of the rows, quantized from the tokens: no row is written in high precision
codes of tokens   codes of the tokens, each quantized once, from which it gathers those of rows
"""


def takes_tokens(layer: Layer, operand: Operand) -> bool:
    """Whether the layer quantizes this operand from the tokens, without rows of them."""
    return operand in layer.of_tokens


def gathers(layer: Layer, operand: Operand, *gemms: Gemm) -> bool:
    """Whether these GEMMs gather the operand's rows, in high precision, from the tokens; True for those not needed."""
    needed = layer.needed
    return all(gemm not in needed or layer.plan.reads_tokens(gemm, operand) for gemm in gemms)


def gathers_codes(layer: Layer, operand: Operand, gemm: Gemm) -> bool:
    """Whether this GEMM is needed, and gathers codes of tokens, each quantized once, as the operand's rows."""
    return gemm in layer.needed and layer.plan.reads_codes_of_tokens(gemm, operand)


def quantizer_of_tokens(layer: Layer, operand: Operand) -> QuantizePlan:
    """The quantizer of tokens, for a GEMM that gathers their codes."""
    return of_one_matrix(layer.quantizers[operand], layer.backend)


def reads_of_dy(fc2: Layer) -> tuple[Read, Read]:
    """What dgrad and wgrad read of dy. If either needs rows, these are written, and both read them."""
    unquantized: list[Gemm] = [gemm for gemm in READERS["dy"] if not fc2.recipe.quantizes(gemm)]
    quantizes_tokens = fc2.quantize_dy is None or takes_tokens(fc2, "dy")
    if not (quantizes_tokens and gathers(fc2, "dy", *unquantized)):
        return "rows", "rows"
    of_codes: Read = "codes of tokens" if gathers_codes(fc2, "dy", "dgrad") else "codes of rows"
    of_dgrad: Read = "tokens" if "dgrad" in unquantized else of_codes
    of_wgrad: Read = "tokens" if "wgrad" in unquantized else "codes of rows"
    return of_dgrad, of_wgrad
