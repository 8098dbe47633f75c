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

from typing import NamedTuple

from octavo.quantizer import Direction, Operand
from octavo.recipe_base import Gemm
from octavo_registry.contract import Weight

Shape = tuple[int, ...]


class Form(NamedTuple):
    """A line of the table above."""

    kernel: Gemm
    left: Operand
    right: Operand

    @property
    def directions(self) -> tuple[Direction, Direction]:
        """The planes that are read, of the left and of the right operand."""
        if self.kernel == "wgrad":
            return "columnwise", "columnwise"
        return "rowwise", "rowwise" if self.kernel == "fprop" else "columnwise"

    def shape(self, left: Shape, right: Shape, groups: int) -> Shape:
        """Of the result; ValueError where operands of these shapes do not go together in `groups` groups."""
        if self.kernel == "wgrad":
            fits = len(left) == len(right) == 2 and left[0] == right[0]
            shape: Shape = (groups, left[-1], right[-1])
        else:
            depth, columns = (1, 2) if self.kernel == "dgrad" else (2, 1)
            fits = len(left) == 2 and len(right) == 3 and right[0] == groups and left[1] == right[depth]
            shape = (left[0], right[columns]) if fits else ()
        if not fits or 0 in shape[1:]:
            axes = {"wgrad": "[M, A] and [M, B]", "fprop": "[M, K] and [G, N, K]", "dgrad": "[M, K] and [G, K, N]"}
            raise ValueError(
                f"{self.left} {list(left)} and {self.right} {list(right)} in {groups} groups do not fit; they are "
                f"{axes[self.kernel]}, with group_sizes of G groups, N and K of 1 or more"
            )
        return shape


_TURNED: dict[Gemm, Form] = {
    "fprop": Form("dgrad", "x", "w"),
    "dgrad": Form("fprop", "dy", "w"),
    "wgrad": Form("wgrad", "x", "dy"),
}
_PLAIN: dict[Gemm, Form] = {
    "fprop": Form("fprop", "x", "w"),
    "dgrad": Form("dgrad", "dy", "w"),
    "wgrad": Form("wgrad", "dy", "x"),
}


def form_of(gemm: Gemm, weight: Weight) -> Form:
    """How `gemm` of a weight with these axes is computed."""
    return (_PLAIN if weight == "nk" else _TURNED)[gemm]
