"""The optional parts of a quantizer's answer: front ends take what is there and never look whether it is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from octavo.grouped_tensor import PLAIN
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits, assert_same_tensor, read_back
from octavo_conformance.oracles.keeping import Surrounded
from octavo_conformance.oracles.quantizing import COLUMNS, GROUPS, ROWS, arguments_for, as_given
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import DTYPES, Array, Rng, draw, draw_sizes, offsets
from octavo_conformance.problems.operands import (
    MAIN,
    RUN_ORDER,
    by_definition,
    draw_problem,
    gemm_operand,
    quantizer_for,
    to_framework,
)
from octavo_numerics import QuantizedArray, quantize
from octavo_registry.contract.plan import Plan


@dataclass(frozen=True, eq=False)
class Call:
    """One operand as the answer's functions take it, and what the definition makes of it."""

    plan: Plan[Any, Any]
    x: Any
    sizes: Any
    how: dict[str, Any]
    expected: QuantizedArray
    amax: Array


def _call(case: Case, rng: Rng, poison: bool) -> Call:
    """Rows with an empty group and a tail of NaN, or stacked matrices; with `poison` a NaN in one group."""
    if case.variant.stacked:  # type: ignore[union-attr]
        _, K, N, groups = MAIN
        x, sizes = draw(rng, (groups, N, K), case.dtype), None
        parts = list(x)
    else:
        K, groups, sizes = COLUMNS, GROUPS, draw_sizes(rng, GROUPS, ROWS - 31)
        x, starts = draw(rng, (ROWS, COLUMNS), case.dtype), offsets(sizes)
        x[int(sizes.sum()) :] = np.nan
        parts = [x[starts[g] : starts[g + 1]] for g in range(groups)]
    if poison:
        next(part for part in parts if part.size)[0, 0] = np.nan
    arguments = arguments_for(case.spec, rng, groups)
    return Call(
        case.plan("quantize", k=K, groups=groups),
        case.array(x),
        None if sizes is None else case.sizes(sizes),
        {"operand": case.spec.role, **as_given(case, arguments)},
        quantize(x, case.spec, sizes, **arguments),
        np.array([np.abs(part.astype(np.float32)).max(initial=0) for part in parts], np.float32),
    )


def _assert_amax(case: Case, measured: Any, expected: Array) -> None:
    """NaN is NaN, whatever its bits."""
    amax = case.numpy(measured)
    assert amax.dtype == np.float32, f"amax is {amax.dtype}; it is fp32 [G]"
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(amax), nan), f"amax is {amax.tolist()}, of values with {expected.tolist()}"
    assert_same_bits(np.where(nan, 0, amax), np.where(nan, np.float32(0), expected), "amax")


@needs("quantize", selections.rows_and_weights)
def test_codes_and_amax_in_one_pass(case: Case, rng: Rng) -> None:
    """`with_amax`, from which delayed scaling makes its next scales: the definition's codes, and the largest magnitude
    of each group, NaN where it holds one, 0 where it is empty, whatever stands past the sum (fault 14)."""
    for poison in (False, True):
        call = _call(case, rng, poison)
        if call.plan.bound.with_amax is None:
            pytest.skip("the answer has no with_amax: front ends read the operand once more")
        codes, amax = call.plan.bound.with_amax(call.x, call.sizes, **call.how)
        assert_same_tensor(case, codes, call.expected, "with_amax: ")
        _assert_amax(case, amax, call.amax)


@needs("quantize", selections.stacked)
def test_codes_over_an_earlier_result(case: Case, rng: Rng) -> None:
    """`into` writes every plane over another weight's, and the amax where it is wanted, and nothing around them; with a
    flag that is not 0 it leaves all of it as it was (fault 37)."""
    first, second = _call(case, rng, poison=True), _call(case, rng, poison=False)
    into, measures = first.plan.bound.into, first.plan.bound.with_amax is not None
    if into is None:
        pytest.skip("the answer has no into: front ends quantize anew and copy")
    memory = Surrounded(case)
    out = memory.tensor(first.plan.run(first.x, first.sizes, **first.how))
    poison = np.full(len(first.amax), np.nan, np.float32)
    for flag, expected, measured in (1, first, poison), (0, second, second.amax):
        amax = memory.array(poison) if measures else None
        unchanged = case.array(np.array([flag], np.int32))
        into(second.x, second.sizes, out=out, amax=amax, unchanged=unchanged, **second.how)
        assert_same_tensor(case, out, expected.expected, f"into, unchanged {flag}: ")
        if measures:
            _assert_amax(case, amax, measured)
    memory.assert_unwritten("into")


@needs("quantize", selections.stacked)
def test_codes_of_packed_weights(case: Case, rng: Rng) -> None:
    """`of_mxfp4` makes of the bytes of an MXFP4 file the codes of the values that they stand for: in both planes, and
    in the one that will be read. Delayed scaling has scales of its own and stochastic rounding a seed, which it is
    not given."""
    groups, N, K = 3, 48, 160
    bound: Any = case.plan("quantize", k=K, groups=groups).bound
    if bound.of_mxfp4 is None or case.spec.stochastic or case.spec.scaling == "delayed":
        pytest.skip("the answer has no of_mxfp4 for this: front ends make values first")
    codes = rng.integers(0, 16, (groups, N, K), np.uint8)
    exponents = rng.integers(117, 130, (groups, N, K // 32), np.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
    values = np.where(codes & 8, -magnitudes, magnitudes) * np.exp2(np.repeat(exponents, 32, -1) - 127.0)
    expected = quantize(values.astype(DTYPES[case.dtype]), case.spec)
    given = case.array(blocks), case.array(exponents)
    assert_same_tensor(case, bound.of_mxfp4(*given), expected, "of_mxfp4: ")
    for direction in case.spec.directions:
        one = read_back(case, bound.of_mxfp4(*given, direction), expected)
        for name in (direction, f"{direction}_scale"):
            assert_same_bits(getattr(one, name), getattr(expected, name), f"of_mxfp4 of {direction} alone: {name}")


@needs("quantize", selections.one_per_scaling)
def test_prepared_sizes_change_no_bit(case: Case, rng: Rng) -> None:
    """`prepare`, whose answer a layer gives to all of its operations on rows: the codes of the sizes themselves."""
    call = _call(case, rng, poison=False)
    if call.plan.prepare is None:
        pytest.skip("the answer has no prepare: front ends give sizes as they are")
    prepared = call.plan.prepare(call.sizes, ROWS, call.x)
    codes = call.plan.run(call.x, prepared, **call.how)
    assert_same_tensor(case, codes, call.expected, "prepared sizes: ")


@needs("gemm", selections.weight_gemms)
def test_a_weight_goes_to_the_backends_layout_and_back(case: Case, rng: Rng) -> None:
    """`from_plain` and `to_plain`, by which checkpoints hold codes: the definition's codes and scales come back, those
    of the quantizer itself, too, and a product of either is the same."""
    problem = draw_problem(rng, case.dtype)
    _, N, K = problem.w.shape
    plan = case.plan(case.gemm, k=K, n=N, groups=len(problem.sizes))
    expected = {name: by_definition(problem, case.recipe, name) for name in RUN_ORDER[case.gemm]}
    codes = expected["w"]
    assert codes is not None, f"{case.gemm} of {case.recipe.kind} reads no codes of w"
    bound: Any = quantizer_for(case, plan, problem, "w", codes.spec.quantizer).bound
    if plan.layouts.get("w", PLAIN) == PLAIN or bound.from_plain is None or bound.to_plain is None:
        pytest.skip("weights have the plain layout, or the answer has no way to it and back")
    x, own = (gemm_operand(case, plan, problem, name, tensor) for name, tensor in expected.items())
    moved = bound.from_plain(to_framework(case, codes, None))
    for name, tensor in ("from_plain", moved), ("the quantizer", own):
        assert_same_tensor(case, bound.to_plain(tensor), codes, f"to_plain of what {name} made: ")
    sizes = case.sizes(problem.sizes)
    of_moved, of_own = (case.numpy(plan.run(x, w, sizes)) for w in (moved, own))
    assert_same_bits(of_moved, of_own, f"{case.gemm} of what from_plain made")
