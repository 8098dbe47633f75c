"""Comparisons: quantized bits with the definition's, GEMM results with their error bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import octavo_numerics
from octavo import HighPrecision, QuantizerSpec, Recipe
from octavo.quantizer import Operand
from octavo.recipe_base import Gemm
from octavo_conformance.problems.case import Case, Measure
from octavo_conformance.problems.inputs import Array, offsets
from octavo_conformance.problems.operands import READS, Problem, padded_offsets, values
from octavo_numerics import QuantizedArray
from octavo_registry.contract.frameworks import PLANES


def read_back(case: Case, tensor: Any, like: QuantizedArray) -> QuantizedArray:
    """A GroupedTensor of the framework as numpy planes, under the definition's spec and sizes."""
    is_one = all(hasattr(tensor, name) for name in ("spec", "group_sizes", *PLANES))
    assert is_one, (
        f"{case.target.name} returned a {type(tensor).__name__} where a quantizer returns the GroupedTensor of "
        f"{case.bridge.name}"
    )
    planes = {}
    for name in PLANES:
        array = getattr(tensor, name)
        planes[name] = None if array is None else case.numpy(array)
    return QuantizedArray(spec=like.spec, group_sizes=like.group_sizes, **planes)


def bits(array: Array) -> Array:
    """The bytes of each element as an unsigned integer."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def assert_same_bits(actual: Array, expected: Array, what: str) -> None:
    """Fails with the first element that differs, its coordinate and both values."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, the definition has {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, the definition has {expected.shape}"
    wrong = np.argwhere(bits(actual) != bits(expected))
    if len(wrong):
        where = tuple(int(index) for index in wrong[0])
        width = 2 * actual.dtype.itemsize
        pytest.fail(
            f"{what}: {len(wrong)} of {actual.size} differ; first at {list(where)}: "
            f"got {actual[where]} (0x{int(bits(actual)[where]):0{width}x}), "
            f"the definition has {expected[where]} (0x{int(bits(expected)[where]):0{width}x})"
        )


def assert_equal(actual: Array, expected: Array, what: str) -> None:
    """Fails with the first value that is not the expected one, its coordinate and both values."""
    wrong = np.argwhere(actual != expected)
    if len(wrong):
        where = tuple(int(index) for index in wrong[0])
        pytest.fail(
            f"{what}: {len(wrong)} of {actual.size} values differ; first at {list(where)}: got {actual[where]}, "
            f"needs {expected[where]}"
        )


def assert_zeros(array: Array, what: str) -> None:
    """Every value is an exact zero."""
    values = array.astype(np.float32)
    assert_equal(values, np.zeros_like(values), f"{what} is not zero")


def assert_same_tensor(case: Case, tensor: Any, expected: QuantizedArray, what: str = "") -> None:
    """Every plane that the spec asks for is there, and its valid part has the definition's bits; the tensor's spec and
    group sizes, by which others read it, are the definition's."""
    mine = read_back(case, tensor, expected)
    assert tensor.spec == expected.spec, f"{what}the tensor's spec is {tensor.spec}; it is {expected.spec}"
    if expected.group_sizes is not None:
        assert tensor.group_sizes is not None, f"{what}the tensor has no group_sizes; it has those of its rows"
        assert_equal(case.integers(tensor.group_sizes), expected.group_sizes, f"{what}group_sizes of the tensor")
    for name in PLANES:
        has, needs = getattr(mine, name) is not None, getattr(expected, name) is not None
        assert has == needs, f"{what}{name}: {'present' if has else 'absent'}, the definition's is not"
    actual, wanted_planes = octavo_numerics.valid(mine), octavo_numerics.valid(expected)
    for name, plane in wanted_planes.items():
        assert_same_bits(actual[name], plane, f"{what}{name} of {describe(expected.spec.quantizer)}")


def describe(spec: QuantizerSpec) -> str:
    """A spec in a few words."""
    words: list[str] = [spec.scaling, spec.format, spec.role]
    options = ("square", "stochastic", "hadamard", "power_of_two", "mxfp4", "square_columns")
    words += [name for name in options if getattr(spec, name)]
    return " ".join(words)


CUTS = ("whole", "row", "column", "tile")
"""The parts of a result whose norms T2 judges."""

LEAST_TERMS = 64
"""T2 takes results whose rounding errors are independent. Sums of few products are not: one product of codes per row
leaves a row of few distinct values, which all round alike."""


@dataclass(frozen=True, eq=False)
class Part:
    """One group's result: actual [R, C] should be a b^T, a [R, k], b [C, k]. `independent`: many independent terms."""

    group: int
    actual: Array
    a: Array
    b: Array
    independent: bool = True


def blocks_of(
    problem: Problem, recipe: Recipe, gemm: Gemm, quantized: Mapping[Operand, QuantizedArray | None], actual: Array
) -> list[Part]:
    """The parts of a GEMM's result, one per group that has rows."""
    planes = {
        operand: values(problem, quantized[operand], operand, direction) for operand, direction in READS[gemm].items()
    }
    plain = offsets(problem.sizes)

    def rows(operand: Operand, group: int) -> slice:
        tensor = quantized[operand]
        if gemm == "wgrad" and tensor is not None and tensor.spec.row_alignment > 1:
            padded = padded_offsets(problem.sizes, tensor.spec.row_alignment)
            return slice(int(padded[group]), int(padded[group + 1]))
        return slice(int(plain[group]), int(plain[group + 1]))

    marked = []
    for group in np.flatnonzero(problem.sizes):
        g = int(group)
        here = slice(int(plain[g]), int(plain[g + 1]))
        if gemm == "fprop":
            part = Part(g, actual[here], planes["x"][rows("x", g)], planes["w"][g])
        elif gemm == "dgrad":
            part = Part(g, actual[here], planes["dy"][rows("dy", g)], planes["w"][g].T)
        else:
            part = Part(g, actual[g], planes["dy"][rows("dy", g)].T, planes["x"][rows("x", g)].T)
        terms = int(problem.sizes[g]) if gemm == "wgrad" else part.a.shape[-1]
        # Hadamard spreads one row of a last, partial run over 16 equal products.
        spread = part.a.shape[-1] != terms and actual.dtype == np.float32
        marked.append(replace(part, independent=terms >= LEAST_TERMS and not spread))
    return marked


def assert_within_bound(
    case: Case, recipe: Recipe, gemm: Gemm, parts: Sequence[Part], measure: Measure, *, cuts: Sequence[str] = CUTS
) -> None:
    """Each group's result is within T1 and, over the `cuts` that the data allow, T2 of docs/numerics; keeps the largest
    error as a share of its bound."""
    accumulation = case.capability(gemm).accumulation
    for part in parts:
        out_dtype: Any = part.actual.dtype.name
        bound = octavo_numerics.error_bound(
            recipe.for_gemm(gemm), part.a.shape[-1], gemm=gemm, out_dtype=out_dtype, accumulation=accumulation
        )
        report = bound.check(part.actual, part.a, part.b, zero_mean=part.independent and bool(cuts))
        ratios = {"T1": report.t1} | {f"T2.{cut}": ratio for cut, ratio in report.t2.items() if cut in cuts}
        for name, ratio in ratios.items():
            measure(f"bound.{gemm}.{name}", ratio)
        if max(ratios.values()) > 1:
            pytest.fail(f"{gemm} of group {part.group}: {report.describe()}")


def assert_zero_rows(array: Array, first: int, what: str) -> None:
    """Rows from `first` on are exact zeros."""
    tail = array[first:].astype(np.float32)
    wrong = np.argwhere(~(tail == 0))
    if len(wrong):
        row, column = (int(index) for index in wrong[0])
        pytest.fail(
            f"{what}: row {first + row} is past the sum {first} and holds {tail[row, column]} in column {column}"
        )


def assert_zero_groups(dw: Array, sizes: Array) -> None:
    """The weight gradient of a group without rows is exactly zero."""
    for group in np.flatnonzero(sizes == 0):
        assert_zeros(dw[group], f"dw of empty group {int(group)}")


def assert_product(
    case: Case,
    problem: Problem,
    actual: Array,
    quantized: Mapping[Operand, QuantizedArray | None],
    measure: Measure,
    cuts: Sequence[str] = CUTS,
) -> None:
    """The result of the case's GEMM is within its bound, and zero where there are no rows."""
    parts = blocks_of(problem, case.recipe, case.gemm, quantized, actual)
    assert_within_bound(case, case.recipe, case.gemm, parts, measure, cuts=cuts)
    if case.gemm == "wgrad":
        assert_zero_groups(actual, problem.sizes)
    else:
        assert_zero_rows(actual, problem.total, case.gemm)


def with_bias(parts: Sequence[Part], problem: Problem, bias_scales: Array | None = None) -> list[Part]:
    """The same with a bias, scaled by row where `bias_scales` [M] is given: one more product in each sum."""
    starts = offsets(problem.sizes)
    with_biases = []
    for part in parts:
        rows = slice(int(starts[part.group]), int(starts[part.group + 1]))
        scale = np.ones(len(part.a)) if bias_scales is None else bias_scales[rows].astype(np.float64)
        bias = problem.bias[part.group].astype(np.float64)
        with_biases.append(replace(part, a=np.column_stack([part.a, scale]), b=np.column_stack([part.b, bias])))
    return with_biases


def assert_bias_gradient(problem: Problem, db: Array, measure: Measure) -> None:
    """db[g] is the fp32 sum of dy's rows, rounded once: a product with a row of ones; 0 for an empty group."""
    out_dtype: Any = db.dtype.name
    starts = offsets(problem.sizes)
    for group in np.flatnonzero(problem.sizes):
        dy = problem.dy[int(starts[group]) : int(starts[group + 1])].astype(np.float64)
        bound = octavo_numerics.error_bound(HighPrecision(), len(dy), gemm="wgrad", out_dtype=out_dtype)
        report = bound.check(db[group][None, :], np.ones((1, len(dy))), dy.T, zero_mean=False)
        measure("bound.dbias.T1", report.t1)
        if report.t1 > 1:
            pytest.fail(f"db of group {int(group)}: {report.describe()}")
    if db[problem.sizes == 0].astype(np.float32).any():
        pytest.fail("db of an empty group is not zero")
