"""How w lies in memory, and what follows for its planes.

A quantizer knows rows and columns alone, and every quantizer of w treats them alike. So a kernel kept as [G, K, N] is
quantized as it lies: the plane whose blocks run along its rows is what a transposed copy would have as the other one.
Blocks of MXFP4, to which a weight may be rounded first, run along K wherever that lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from octavo import QuantizerSpec
from octavo.quantizer import Direction, Operand, Orientation
from octavo.recipe_base import READERS, Gemm
from octavo_registry.contract.cards import Weight

WEIGHT_SHAPES: Mapping[Weight, str] = MappingProxyType({"nk": "[G, N, K]", "kn": "[G, K, N]"})

_TURNED: Mapping[Orientation, Orientation] = {"rowwise": "columnwise", "columnwise": "rowwise", "both": "both"}
_TURNED_MXFP4: Mapping[Direction | None, Direction | None] = {
    "rowwise": "columnwise",
    "columnwise": "rowwise",
    None: None,
}


def readers(operand: Operand, weight: Weight) -> tuple[Gemm, Gemm]:
    """The GEMM that reads an operand's rowwise plane, then the one that reads its columnwise plane."""
    rowwise, columnwise = READERS[operand]
    return (columnwise, rowwise) if operand == "w" and weight == "kn" else (rowwise, columnwise)


def as_it_lies(spec: QuantizerSpec, operand: Operand, weight: Weight) -> QuantizerSpec:
    """The quantizer whose planes of the matrices in memory are those that `spec` asks for of w as [G, N, K]."""
    if operand != "w" or weight == "nk" or (spec.orientation == "both" and spec.mxfp4 is None):
        return spec
    turned = {"orientation": _TURNED[spec.orientation], "mxfp4": _TURNED_MXFP4[spec.mxfp4]}
    return QuantizerSpec(**{**dict(spec), **turned})
