"""`interleaved` of the answers to "quantize" and "wgrad", as the GEMMs of a layer need it.

Codes of interleaved gate and up rows are read in the layouts of fprop and dgrad, and dw is written interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from octavo.grouped_tensor import PLAIN
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import DTYPES, Array, Rng
from octavo_conformance.problems.interleaving import blocks_and_rows, check_none, interleaved
from octavo_conformance.problems.operands import (
    MAIN,
    RUN_ORDER,
    SEED,
    Problem,
    by_definition,
    draw_problem,
    gemm_operand,
)
from octavo_registry.contract.cards import Weight
from octavo_registry.contract.plan import Plan
from octavo_registry.contract.weights import as_it_lies, readers


def _draw(case: Case, rng: Rng, rows: int) -> Problem:
    """A problem whose w has so many rows, with a group without rows."""
    problem = draw_problem(rng, case.dtype, (MAIN[0], MAIN[1], rows, MAIN[3]))
    problem.sizes[int(rng.integers(len(problem.sizes)))] = 0
    return problem


def _plan(case: Case, problem: Problem, weight: Weight, **fields: Any) -> Plan:
    _, N, K = problem.w.shape
    return case.plan(case.gemm, k=K, n=N, groups=len(problem.sizes), weight=weight, **fields)


# ---- codes in the layouts of a layer


def _check_codes(case: Case, rng: Rng, weight: Weight) -> None:
    axis = 1 if weight == "nk" else 2
    for block, rows in blocks_and_rows(rng):
        problem = _draw(case, rng, rows)
        w = problem.w if weight == "nk" else np.ascontiguousarray(problem.w.swapaxes(1, 2))
        plan = _plan(case, problem, weight)
        layout, is_rowwise = plan.layouts.get("w", PLAIN), readers("w", weight)[0] == case.gemm
        bound: Any = case.plan(
            "quantize",
            recipe=None,
            quantizer=as_it_lies(case.recipe.quantizer("w"), "w", weight),
            stacked=True,
            out_dtype=case.dtype,
            k=w.shape[2],
            n=w.shape[1],
            groups=len(w),
            layouts=(layout, PLAIN) if is_rowwise else (PLAIN, layout),
        ).bound
        if bound.interleaved is None:
            pytest.skip("the quantizer's answer has no interleaved: front ends take weights apart first")
        answer = bound.interleaved(block, weight)
        if check_none(answer, block):
            continue
        left: Any = RUN_ORDER[case.gemm][0]
        rows_read = gemm_operand(case, plan, problem, left, by_definition(problem, case.recipe, left))
        spec = case.recipe.quantizer("w")
        scale = case.array(problem.scales["w"]) if spec.scaling == "delayed" else None
        how = {"seed": SEED if spec.stochastic else None, "operand": "w", "scale": scale}
        expected, actual = (
            case.numpy(plan.run(rows_read, codes, case.sizes(problem.sizes)))
            for codes in (
                bound.run(case.array(w), None, **how),
                answer.run(case.array(interleaved(w, block, axis)), None, **how),
            )
        )
        assert_same_bits(
            actual, expected, f"{case.gemm} of codes interleaved in blocks of {block} in {weight}, {layout}"
        )


@needs("gemm", selections.weight_gemms)
def test_products_of_interleaved_rows(case: Case, rng: Rng) -> None:
    """fprop and dgrad of codes of interleaved [G, 2 F, K] have the halves' bits, in the layout that each reads."""
    _check_codes(case, rng, "nk")


@needs("gemm", selections.weight_gemms, weight="kn")
def test_products_of_interleaved_columns(case: Case, rng: Rng) -> None:
    """The same of a weight stored as [G, K, 2 F]."""
    _check_codes(case, rng, "kn")


# ---- interleaved dw


@dataclass(frozen=True)
class Gradient:
    """The plan of wgrad and its operands; `axis` of dw has the 2 F rows."""

    case: Case
    problem: Problem
    plan: Plan
    operands: list[Any]
    axis: int

    def run(self, run: Any, **how: Any) -> Array:
        """dw by `run`."""
        return self.case.numpy(run(*self.operands, self.case.sizes(self.problem.sizes), **how))

    def answer(self, block: int) -> Any:
        """The backend's for such a block; None where it leaves it to front ends. Skips where it has none at all."""
        bound: Any = self.plan.bound
        if bound.interleaved is None:
            pytest.skip("the answer has no interleaved: front ends join the halves of dw")
        answer = bound.interleaved(block)
        if check_none(answer, block):
            return None
        assert dict(answer.layouts) == dict(bound.layouts), "operands are asked for in other layouts than the halves'"
        return answer


def _gradient(case: Case, problem: Problem, weight: Weight, **fields: Any) -> Gradient:
    plan, quantizes = _plan(case, problem, weight, **fields), case.recipe.quantizes("wgrad")
    operands = [
        gemm_operand(case, plan, problem, name, by_definition(problem, case.recipe, name) if quantizes else None)
        for name in RUN_ORDER["wgrad"]
    ]
    return Gradient(case, problem, plan, operands, 1 if weight == "nk" else 2)


def _buffers(case: Case, start: Array) -> Iterator[tuple[str, Any, Any]]:
    """(what it is, the whole array, the part of it that holds `start`): contiguous, with its last two axes swapped in
    memory, and with gaps of NaN between rows and groups, which are multiples of the 16 bytes that kernels store."""
    whole = case.array(start.copy())
    yield "contiguous", whole, whole
    turned = case.array(np.ascontiguousarray(start.swapaxes(1, 2)))
    yield "turned", turned, turned.swapaxes(1, 2)
    groups, rows, columns = start.shape
    padded = np.full((groups, rows + 16, columns + 32), np.nan, start.dtype)
    padded[:, 8 : 8 + rows, 16 : 16 + columns] = start
    whole = case.array(padded)
    yield "strided", whole, whole[:, 8 : 8 + rows, 16 : 16 + columns]


def _check_out(
    gradient: Gradient, run: Any, halves: Array, start: Array, block: int, *, accumulate: bool, written: bool = True
) -> bool:
    """Into arrays of each kind, which hold `start` interleaved: the bits of `halves`, and NaN in the gaps.

    written   the framework writes into `out`. Returns whether it does: one whose arrays are immutable says so in a
              ValueError, and returns the sum of an `out` to accumulate into
    """
    case, expected = gradient.case, interleaved(halves, block, gradient.axis)
    for kind, whole, out in _buffers(case, interleaved(start, block, gradient.axis)):
        what = f"dw interleaved in blocks of {block} in a {kind} out, accumulate={accumulate}"
        try:
            actual = gradient.run(run, out=out, accumulate=accumulate)
        except ValueError as error:
            if "out" not in str(error) or accumulate:
                raise
            return False
        assert_same_bits(actual, expected, what)
        if not written:
            continue
        assert_same_bits(case.numpy(out), expected, f"{what}, as it is left")
        if kind == "strided":
            left = case.numpy(whole).astype(np.float32)
            left[:, 8 : 8 + expected.shape[1], 16 : 16 + expected.shape[2]] = np.nan
            assert np.isnan(left).all(), f"{what}: a gap was written"
    return written


def _check_gradients(case: Case, rng: Rng, weight: Weight) -> None:
    for block, rows in blocks_and_rows(rng):
        problem = _draw(case, rng, rows)
        gradient = _gradient(case, problem, weight)
        answer = gradient.answer(block)
        if answer is None:
            continue
        dw = gradient.run(gradient.plan.run)
        assert_same_bits(
            gradient.run(answer.run), interleaved(dw, block, gradient.axis), f"dw interleaved in blocks of {block}"
        )
        poison = np.full(dw.shape, np.nan, DTYPES[case.dtype])
        written = _check_out(gradient, answer.run, dw, poison, block, accumulate=False)
        wide = _gradient(case, problem, weight, out_dtype="float32")
        start = rng.standard_normal(dw.shape).astype(np.float32)
        empty = np.flatnonzero(problem.sizes == 0)
        start[empty, 0], start[empty, 1] = -0.0, np.nan
        total = wide.run(wide.plan.run, out=case.array(start.copy()), accumulate=True)
        assert_same_bits(total[empty], start[empty], "accumulator of empty groups")
        _check_out(wide, wide.answer(block).run, total, start, block, accumulate=True, written=written)


@needs("gemm", selections.wgrads)
def test_gradients_of_interleaved_rows(case: Case, rng: Rng) -> None:
    """dw [G, 2 F, K] with gate and up rows interleaved: a new array, over NaN, and added to what is there, contiguous
    or not. It has the bits of the halves' dw; an empty group is zero, or keeps its bits."""
    _check_gradients(case, rng, "nk")


@needs("gemm", selections.wgrads, weight="kn")
def test_gradients_of_interleaved_columns(case: Case, rng: Rng) -> None:
    """The same of dw [G, K, 2 F]."""
    _check_gradients(case, rng, "kn")


@needs("gemm", selections.wgrads)
def test_a_limit_changes_no_bit_of_interleaved_rows(case: Case, rng: Rng) -> None:
    """`limited` of the answer for single rows: on one multiprocessor, on a few, and on more than there are."""
    problem = _draw(case, rng, MAIN[2])
    gradient = _gradient(case, problem, "nk")
    answer = gradient.answer(1)
    if answer.limited is None:
        pytest.skip("the answer for interleaved rows offers no limit of multiprocessors")
    free = interleaved(gradient.run(gradient.plan.run), 1, gradient.axis)
    for most in (1, int(rng.integers(2, 64)), 100_000):
        assert_same_bits(gradient.run(answer.limited(most)), free, f"interleaved dw on {most} multiprocessors")


@needs("gemm", selections.wgrads)
def test_all_groups_of_interleaved_rows_are_empty(case: Case, rng: Rng) -> None:
    """Zeros over NaN, and sums of which every bit stays."""
    problem = replace(_draw(case, rng, MAIN[2]), sizes=np.zeros(MAIN[3], np.int32))
    gradient = _gradient(case, problem, "nk", out_dtype="float32")
    run, start = gradient.answer(1).run, rng.standard_normal(problem.w.shape).astype(np.float32)
    written = _check_out(gradient, run, np.zeros_like(start), np.full_like(start, np.nan), 1, accumulate=False)
    _check_out(gradient, run, start, start, 1, accumulate=True, written=written)
