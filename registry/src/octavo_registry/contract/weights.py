"""How w lies in memory, and what follows for its planes and for the GEMMs that read it.

A quantizer knows rows and columns alone, and every quantizer of w treats them alike. So a kernel kept as [G, K, N] is
quantized as it lies: the plane whose blocks run along its rows is what a transposed copy would have as the other one.
Blocks of MXFP4, to which a weight may be rounded first, run along K wherever that lies.

For backends whose kernels know weights [G, N, K] alone, `gemm_form` says which of their GEMMs computes a request.
A weight [G, K, N] is one whose N is the layer's K and whose K is the layer's N: dgrad computes y from it, fprop dx, and
wgrad of x on the left and dy on the right dw in [G, K, N]. So no weight and no dw is ever transposed in memory.

| request, w as | the kernels' GEMM | left | right |
|---|---|---|---|
| fprop, [G, N, K] | fprop | x rowwise | w rowwise |
| dgrad, [G, N, K] | dgrad | dy rowwise | w columnwise |
| wgrad, [G, N, K] | wgrad | dy columnwise | x columnwise |
| fprop, [G, K, N] | dgrad | x rowwise | w columnwise |
| dgrad, [G, K, N] | fprop | dy rowwise | w rowwise |
| wgrad, [G, K, N] | wgrad | x columnwise | dy columnwise |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
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


_OPERANDS: Mapping[Weight, Mapping[Gemm, tuple[Gemm, tuple[Operand, Operand]]]] = MappingProxyType(
    {
        "nk": {"fprop": ("fprop", ("x", "w")), "dgrad": ("dgrad", ("dy", "w")), "wgrad": ("wgrad", ("dy", "x"))},
        "kn": {"fprop": ("dgrad", ("x", "w")), "dgrad": ("fprop", ("dy", "w")), "wgrad": ("wgrad", ("x", "dy"))},
    }
)


@dataclass(frozen=True)
class GemmForm:
    """A line of the table above.

    kernel      the kernels' GEMM
    operands    left and right
    directions  the plane of each that is read
    turned      whether the kernels' N is the layer's K
    """

    kernel: Gemm
    operands: tuple[Operand, Operand]
    directions: tuple[Direction, Direction]
    turned: bool

    def sides(self, n: int, k: int) -> tuple[int, int]:
        """The layer's N and K as the kernels count them, and the kernels' as the layer counts them."""
        return (k, n) if self.turned else (n, k)

    def renamed(self, of_kernel: Mapping[str, str]) -> dict[str, str]:
        """`of_kernel` with the request's names of operands as keys, in place of those of the kernels' GEMM."""
        names = zip(self.operands, _OPERANDS["nk"][self.kernel][1], strict=True)
        return {ours: of_kernel[theirs] for ours, theirs in names if theirs in of_kernel}


@lru_cache
def gemm_form(gemm: Gemm, weight: Weight) -> GemmForm:
    """How `gemm` of a weight with these axes is computed."""
    kernel, operands = _OPERANDS[weight][gemm]

    def direction(operand: Operand) -> Direction:
        return "rowwise" if readers(operand, weight)[0] == gemm else "columnwise"

    return GemmForm(kernel, operands, (direction(operands[0]), direction(operands[1])), weight == "kn")
