"""GEMMs of weights [G, N, K] compute those of weights [G, K, N], read as they lie."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import get_args

import pytest

from octavo.recipe_base import READERS, Gemm
from octavo_registry.contract import GemmForm, Weight, gemm_form, readers

M, N, K = 3, 2, 4
Matrix = list[list[Fraction]]


def _transposed(matrix: Matrix) -> Matrix:
    return [list(column) for column in zip(*matrix, strict=True)]


def _product(left: Matrix, right: Matrix) -> Matrix:
    return [[sum((a * b for a, b in zip(row, column, strict=True)), Fraction()) for column in zip(*right, strict=True)]
            for row in left]  # fmt: skip


def _kernel(form: GemmForm, left: Matrix, right: Matrix) -> Matrix:
    """What kernels that know weights [N, K] alone make of these operands."""
    if form.kernel == "wgrad":
        return _product(_transposed(left), right)
    return _product(left, right if form.kernel == "dgrad" else _transposed(right))


@pytest.mark.parametrize("weight", get_args(Weight))
def test_the_table_is_true(weight: Weight) -> None:
    """y, dx and dw of one group, in exact arithmetic: dw lies as w does."""
    draw = Random()
    of = {name: [[Fraction(draw.randint(-9, 9)) for _ in range(columns)] for _ in range(rows)]
          for name, rows, columns in (("x", M, K), ("dy", M, N), ("w", N, K))}  # fmt: skip
    x, dy, w = of["x"], of["dy"], of["w"]
    wanted = {"fprop": _product(x, _transposed(w)), "dgrad": _product(dy, w), "wgrad": _product(_transposed(dy), x)}
    if weight == "kn":
        of["w"], wanted["wgrad"] = _transposed(w), _transposed(wanted["wgrad"])
    for gemm in get_args(Gemm):
        form = gemm_form(gemm, weight)
        assert _kernel(form, *(of[name] for name in form.operands)) == wanted[gemm], gemm
        assert form.sides(N, K) == ((N, K) if weight == "nk" else (K, N))


def test_planes_are_those_that_readers_name() -> None:
    """The registry asks a quantizer for the plane that the kernel then reads."""
    for weight in get_args(Weight):
        for gemm in get_args(Gemm):
            form = gemm_form(gemm, weight)
            for operand, direction in zip(form.operands, form.directions, strict=True):
                place = ("rowwise", "columnwise").index(direction)
                assert readers(operand, weight)[place] == gemm, (gemm, weight, operand)
    assert set(READERS) == {"x", "w", "dy"}


def test_what_a_kernel_says_of_its_operands_is_renamed() -> None:
    """A layout of the kernel's left operand is that of the request's; what it does not name stays unnamed."""
    assert gemm_form("wgrad", "kn").renamed({"dy": "left", "x": "right"}) == {"x": "left", "dy": "right"}
    assert gemm_form("dgrad", "kn").renamed({"x": "left", "w": "right"}) == {"dy": "left", "w": "right"}
    assert gemm_form("fprop", "kn").renamed({"w": "right"}) == {"w": "right"}
