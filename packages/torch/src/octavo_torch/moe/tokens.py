"""Rows of a router's choices that are never written: quantizers and GEMMs read the tokens instead."""

from __future__ import annotations

from octavo.quantizer import Operand
from octavo.recipe_base import Gemm
from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.quantizer_plans import of_one_matrix


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
