"""Which of the kernels' GEMMs computes a request, and what it reads.

The kernels take weights [G, N, K]. A weight [G, K, N] is one whose N is the layer's K and whose K is the layer's N: the
kernels' dgrad computes y from it, their fprop dx, and wgrad of x on the left and dy on the right dw in [G, K, N]. So no
weight and no dw is ever transposed in memory.

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

from dataclasses import dataclass
from functools import lru_cache

from octavo.quantizer import Direction, Operand
from octavo.recipe_base import Gemm
from octavo_native.gemms import OPERANDS_OF_GEMM
from octavo_registry.contract import Weight, readers

_TURNED: dict[Gemm, tuple[Gemm, tuple[Operand, Operand]]] = {
    "fprop": ("dgrad", ("x", "w")),
    "dgrad": ("fprop", ("dy", "w")),
    "wgrad": ("wgrad", ("x", "dy")),
}


@dataclass(frozen=True)
class Form:
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


@lru_cache
def form_of(gemm: Gemm, weight: Weight) -> Form:
    """How `gemm` of a weight with these axes is computed."""
    kernel, operands = (gemm, OPERANDS_OF_GEMM[gemm]) if weight == "nk" else _TURNED[gemm]

    def direction(operand: Operand) -> Direction:
        return "rowwise" if readers(operand, weight)[0] == gemm else "columnwise"

    return Form(kernel, operands, (direction(operands[0]), direction(operands[1])), weight == "kn")
