"""GEMMs on operands that the definition quantized, against float64 within docs/numerics' bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo import Recipe
from octavo.quantizer import Operand
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs, needs_the_rest
from octavo_conformance.oracles.checks import (
    assert_product,
    assert_same_bits,
    assert_within_bound,
    assert_zero_rows,
    assert_zeros,
    blocks_of,
    with_bias,
)
from octavo_conformance.oracles.keeping import Surrounded
from octavo_conformance.problems.case import OPERANDS, Case, Measure
from octavo_conformance.problems.inputs import DTYPES, Array, Rng, draw_sizes
from octavo_conformance.problems.operands import (
    MAIN,
    RUN_ORDER,
    Problem,
    by_definition,
    draw_problem,
    gemm_call,
    gemm_operand,
    to_framework,
)
from octavo_numerics import QuantizedArray, valid
from octavo_registry.contract.frameworks import PLANES
from octavo_registry.contract.gemm import BoundFprop
from octavo_registry.contract.plan import Plan


def _plan(case: Case, problem: Problem, **fields: Any) -> Plan:
    _, N, K = problem.w.shape
    return case.plan(case.gemm, k=K, n=N, groups=len(problem.sizes), **fields)


def _quantized(case: Case, problem: Problem) -> dict[Operand, QuantizedArray | None]:
    recipe: Recipe = case.recipe
    if not recipe.quantizes(case.gemm):
        return dict.fromkeys(OPERANDS)
    return {operand: by_definition(problem, recipe, operand) for operand in OPERANDS}


def _run(
    case: Case, plan: Plan, problem: Problem, quantized: dict[Operand, QuantizedArray | None], **rest: Any
) -> Array:
    operands = [gemm_operand(case, plan, problem, name, quantized[name]) for name in RUN_ORDER[case.gemm]]
    return case.numpy(plan.run(*operands, case.sizes(problem.sizes), **rest))


@needs("gemm", selections.gemms)
def test_product_is_within_its_bound(case: Case, rng: Rng, full: bool, measure: Measure) -> None:
    """fprop, dgrad and wgrad of every recipe, ragged, with empty groups and a tail: each element, row, column and
    8x8 tile is bounded (faults 1, 2, 3, 6, 7, 16, 58, 59); an empty group's dw and the tail are exact zeros."""
    _check_products(case, rng, 6 if full else 2, measure)


@needs_the_rest("gemm")
def test_product_of_what_else_is_declared(case: Case, rng: Rng, measure: Measure) -> None:
    """Recipes and dtypes that the card declares and the selection leaves out: whatever is declared is tried."""
    _check_products(case, rng, 1, measure)


def _check_products(case: Case, rng: Rng, repeats: int, measure: Measure) -> None:
    for _ in range(repeats):
        problem = draw_problem(rng, case.dtype)
        plan = _plan(case, problem)
        quantized = _quantized(case, problem)
        actual = _run(case, plan, problem, quantized)
        assert actual.dtype == DTYPES[case.dtype], f"result is {actual.dtype}, {case.dtype} was asked for"
        assert_product(case, problem, actual, quantized, measure)


@needs("gemm", selections.gemms)
def test_a_limit_changes_no_bit(case: Case, rng: Rng) -> None:
    """On one multiprocessor, on a few, and on more than there are, a GEMM that offers `limited` has the bits that it
    has on all: who leaves room to a collective trains the same model."""
    problem = draw_problem(rng, case.dtype)
    plan, quantized = _plan(case, problem), _quantized(case, problem)
    bound: Any = plan.bound
    if bound.limited is None:
        pytest.skip("the backend offers no limit of multiprocessors")
    free = _run(case, plan, problem, quantized)
    for most in (1, int(rng.integers(2, 64)), 100_000):
        limited = replace(plan, bound=replace(bound, run=bound.limited(most)))
        assert_same_bits(_run(case, limited, problem, quantized), free, f"{case.gemm} on {most} multiprocessors")


@needs("gemm", selections.gemms)
def test_halves_of_a_weight_are_interleaved(case: Case, rng: Rng) -> None:
    """`interleave_halves`, where fprop's answer has it, moves every row and no other, and back: gate and up columns of
    [G, K, 2 F], and rows of [G, 2 F, K], in blocks of one, of some, and of a half: to a new array, and into one whose
    surroundings stay as they are."""
    problem = draw_problem(rng, case.dtype)
    bound: Any = _plan(case, problem).bound
    interleave = bound.interleave_halves if isinstance(bound, BoundFprop) else None
    if interleave is None:
        pytest.skip("the answer has no interleave_halves: front ends copy by their framework's operations")
    groups, rows, columns = problem.w.shape
    half, w, memory = rows // 2, problem.w[:, : rows // 2 * 2], Surrounded(case)
    for block in (1, next(n for n in range(half // 2, 0, -1) if half % n == 0), half):
        for shape in ((groups, 2 * half, columns), (groups * columns, 2 * half, 1)):
            halves = w.reshape(shape[0], 2, half // block, block, shape[2])
            interleaved = np.ascontiguousarray(halves.swapaxes(1, 2))
            for order, given, wanted in (True, halves, interleaved), (False, interleaved, halves):
                what = f"{'interleaved in blocks' if order else 'halves'} of {block}"
                value, expected = case.array(given.reshape(shape)), wanted.reshape(shape)
                assert_same_bits(case.numpy(interleave(value, block, order)), expected, what)
                if case.writes_arrays:
                    out = memory.array(np.zeros_like(expected))
                    interleave(value, block, order, out)
                    assert_same_bits(case.numpy(out), expected, f"{what}, as out is left")
    memory.assert_unwritten("interleave_halves")


@needs("gemm", selections.mx_gemms, weight="kn")
def test_weights_that_lie_the_other_way(case: Case, rng: Rng, measure: Measure) -> None:
    """A weight stored as [G, K, N] and quantized as it lies: fprop reads its columnwise plane, dgrad its rowwise one,
    and wgrad writes dw as [G, K, N]; the bounds are those of [G, N, K], whose planes these are. Every second row and
    column of w is 2^20 times smaller: where codes of a plane lose the small ones, those of the other have them."""
    problem = draw_problem(rng, case.dtype)
    for small in (problem.w[:, ::2], problem.w[:, :, 1::2]):
        small *= small.dtype.type(2.0**-20)
    turned = replace(problem, w=np.ascontiguousarray(np.swapaxes(problem.w, 1, 2)))
    actual = _run(case, _plan(case, problem, weight="kn"), turned, _quantized(case, turned))
    if case.gemm == "wgrad":
        actual = np.ascontiguousarray(np.swapaxes(actual, 1, 2))
    assert_product(case, problem, actual, _quantized(case, problem), measure, cuts=())


@needs("gemm", selections.few_gemms)
def test_fp32_result(case: Case, rng: Rng, measure: Measure) -> None:
    """out_dtype float32 keeps the accumulator: no rounding through a narrower type, which would also hide that a
    sum is not promoted where no scale of a block makes a kernel do so."""
    problem = draw_problem(rng, case.dtype)
    plan = _plan(case, problem, out_dtype="float32")
    quantized = _quantized(case, problem)
    actual = _run(case, plan, problem, quantized)
    assert actual.dtype == np.float32, f"{case.gemm} is {actual.dtype}, the request's out_dtype float32"
    assert_product(case, problem, actual, quantized, measure)


@needs("gemm", selections.few_fprops)
def test_bias_is_added(case: Case, rng: Rng, measure: Measure) -> None:
    """y has its group's bias, before the one rounding, and none past the sum."""
    problem = draw_problem(rng, case.dtype)
    quantized = _quantized(case, problem)
    actual = _run(case, _plan(case, problem), problem, quantized, bias=case.array(problem.bias))
    parts = blocks_of(problem, case.recipe, "fprop", quantized, actual)
    assert_within_bound(case, case.recipe, "fprop", with_bias(parts, problem), measure)
    assert_zero_rows(actual, problem.total, "y with a bias")


@needs("gemm", selections.mx_fprops)
def test_bias_is_scaled_by_row(case: Case, rng: Rng, measure: Measure) -> None:
    """With `bias_scales` [M] row r gets bias_scales[r] times its group's bias; scales past the sum are not read."""
    problem = draw_problem(rng, case.dtype)
    quantized = _quantized(case, problem)
    scales = rng.standard_normal(len(problem.x)).astype(np.float32)
    scales[problem.total :] = np.nan
    run = {"bias": case.array(problem.bias), "bias_scales": case.array(scales)}
    actual = _run(case, _plan(case, problem), problem, quantized, **run)
    parts = blocks_of(problem, case.recipe, "fprop", quantized, actual)
    assert_within_bound(case, case.recipe, "fprop", with_bias(parts, problem, scales), measure)
    assert_zero_rows(actual, problem.total, "y with a scaled bias")


@needs("gemm", selections.gemms)
def test_unspecified_rows_are_not_read(case: Case, rng: Rng) -> None:
    """Codes and scales past the sum are the quantizer's business: filled with NaN they change no bit
    (faults 9, 12)."""
    problem = draw_problem(rng, case.dtype, sizes=draw_sizes(rng, MAIN[3], MAIN[0] - 40))
    plan = _plan(case, problem)
    if any(plan.layouts.get(name, "plain") != "plain" for name in RUN_ORDER[case.gemm]):
        pytest.skip("operands are in the backend's own layout, whose padding it fills itself")
    quantized = _quantized(case, problem)
    clean = _run(case, plan, problem, quantized)
    operands = []
    for name in RUN_ORDER[case.gemm]:
        tensor = quantized[name]
        if tensor is None:
            array = problem.of(name).copy()
            if name != "w":
                array[problem.total :] = np.nan
            operands.append(case.array(array))
        else:
            operands.append(to_framework(case, _poisoned(tensor), case.sizes(problem.sizes)))
    actual = case.numpy(plan.run(*operands, case.sizes(problem.sizes)))
    assert_same_bits(actual, clean, f"{case.gemm} with NaN in unspecified rows")


def _poisoned(tensor: QuantizedArray) -> QuantizedArray:
    """The tensor with 0xFF bytes wherever the definition leaves values open (stacked matrices have no such place)."""
    if tensor.group_sizes is None:
        return tensor
    valid_parts = valid(tensor)
    planes = {}
    for name in PLANES:
        array = getattr(tensor, name)
        if array is None or array.shape == valid_parts[name].shape:
            continue
        filled = np.full(array.shape, 0xFF, dtype=np.uint8).view(np.uint8)
        if array.dtype.itemsize > 1:
            filled = np.full((*array.shape, array.dtype.itemsize), 0xFF, dtype=np.uint8)
        elif array.dtype == np.uint8 and name in ("rowwise", "columnwise"):
            filled &= 0x0F
        poisoned = filled.view(array.dtype).reshape(array.shape).copy()
        poisoned[: len(valid_parts[name])] = valid_parts[name]
        planes[name] = poisoned
    return replace(tensor, **planes)


@needs("gemm", selections.gemms)
def test_sizes_of_either_width(case: Case, rng: Rng) -> None:
    """Sizes are integers of 32 or of 64 bits, as callers have them, on the rows' device: the same bits."""
    problem = draw_problem(rng, case.dtype)
    run, operands = gemm_call(case, problem)
    narrow = case.numpy(run(*operands, case.sizes(problem.sizes)))
    wide = case.numpy(run(*operands, case.array(problem.sizes.astype(np.int64))))
    assert_same_bits(wide, narrow, f"{case.gemm} with int64 sizes")


@needs("gemm", selections.gemms)
def test_no_rows(case: Case, rng: Rng) -> None:
    """A batch without a row, as a rank has to which no token was sent: zeros of dw, and nothing else."""
    _, K, N, G = MAIN
    problem = draw_problem(rng, case.dtype, (0, K, N, G), np.zeros(G, dtype=np.int32))
    actual = _run(case, _plan(case, problem), problem, _quantized(case, problem))
    wanted = {"fprop": (0, N), "dgrad": (0, K), "wgrad": (G, N, K)}[case.gemm]
    assert actual.shape == wanted, f"{case.gemm} of no rows has shape {actual.shape}, not {wanted}"
    assert_zeros(actual, f"{case.gemm} of no rows")


@needs("gemm", selections.gemms)
def test_all_groups_empty(case: Case, rng: Rng) -> None:
    """Sizes that are all zero give zeros and neither NaN nor a hang (faults 1, 3, 5, 34)."""
    problem = draw_problem(rng, case.dtype, sizes=np.zeros(MAIN[3], dtype=np.int32))
    actual = _run(case, _plan(case, problem), problem, _quantized(case, problem))
    assert_zeros(actual, f"{case.gemm} of groups without rows")


@needs("gemm", selections.mx_wgrads)
def test_wgrad_accumulates(case: Case, rng: Rng, measure: Measure) -> None:
    """With `out` and accumulate=True dw is added to it and to nothing around it, and an empty group leaves its part
    untouched to the bit: in fp32, and in the operands' dtype where that is served. A framework whose arrays cannot be
    written gets the sum."""
    problem = draw_problem(rng, case.dtype)
    problem.sizes[int(rng.integers(len(problem.sizes)))] = 0
    _, N, K = problem.w.shape
    served = [
        dtype
        for dtype in dict.fromkeys(("float32", case.dtype))
        if case.refusal_of(case.request("wgrad", k=K, n=N, groups=len(problem.sizes), out_dtype=dtype)) is None
    ]
    if not served:
        _plan(case, problem, out_dtype="float32")  # skips with the reason
    for dtype in served:
        _check_sum(case, rng, problem, dtype, measure)


def _check_sum(case: Case, rng: Rng, problem: Problem, dtype: Any, measure: Measure) -> None:
    quantized = _quantized(case, problem)
    plan = _plan(case, problem, out_dtype=dtype)
    G, N, K = problem.w.shape
    row = rng.standard_normal((G, N)).astype(DTYPES[dtype])
    start = np.ascontiguousarray(np.broadcast_to(row[:, :, None], (G, N, K)))
    memory = Surrounded(case)
    out = memory.array(start)
    actual = _run(case, plan, problem, quantized, out=out, accumulate=True)
    memory.assert_unwritten("wgrad")
    assert actual.dtype == DTYPES[dtype], f"dw is {actual.dtype}, its accumulator {dtype}"
    if case.writes_arrays:
        assert_same_bits(case.numpy(out), actual, "the accumulator, beside what was returned")
    parts = [
        replace(
            part,
            a=np.column_stack([part.a, row[part.group].astype(np.float64)]),
            b=np.column_stack([part.b, np.ones(K)]),
        )
        for part in blocks_of(problem, case.recipe, "wgrad", quantized, actual)
    ]
    assert_within_bound(case, case.recipe, "wgrad", parts, measure, cuts=())
    empty = problem.sizes == 0
    assert_same_bits(actual[empty], start[empty], "accumulator of empty groups")


@needs("gemm", selections.gemms)
def test_poisoned_out_is_overwritten(case: Case, rng: Rng) -> None:
    """NaN in `out` changes no bit: tails and empty groups are written too (faults 1, 3, 8, 12), and nothing around it
    is. A framework whose arrays cannot be written says so in a ValueError."""
    problem = draw_problem(rng, case.dtype)
    quantized = _quantized(case, problem)
    plan = _plan(case, problem)
    fresh = _run(case, plan, problem, quantized)
    memory = Surrounded(case)
    poison = memory.array(np.full(fresh.shape, np.nan, dtype=fresh.dtype))
    try:
        actual = _run(case, plan, problem, quantized, out=poison)
    except ValueError as error:
        if "out" not in str(error):
            raise
        pytest.skip(f"no out: {error}")
    assert_same_bits(actual, fresh, f"{case.gemm} into a poisoned out")
    assert_same_bits(case.numpy(poison), fresh, "out itself, which callers read")
    memory.assert_unwritten(case.gemm)


def _long_problem(case: Case, rng: Rng, length: int, others: tuple[int, int]) -> Problem:
    """A problem whose GEMM sums over `length`."""
    K, N = others
    if case.gemm == "wgrad":
        return draw_problem(rng, case.dtype, (length, K, N, 2), np.array([length - 30, 17], dtype=np.int32))
    shape = (80, length, N, 2) if case.gemm == "fprop" else (80, K, length, 2)
    return draw_problem(rng, case.dtype, shape, np.array([41, 30], dtype=np.int32))


@needs("gemm", selections.mx_gemms)
def test_long_sums(case: Case, rng: Rng, full: bool, measure: Measure) -> None:
    """A sum far longer than one tile, a multiple of 16 and of no tile, as kernels that refuse odd columns serve
    (faults 20, 21, 24, 25); more than 16 384 in the full selection."""
    problem = _long_problem(case, rng, 16_432 if full else 1_072, (48, 80))
    quantized = _quantized(case, problem)
    assert_product(case, problem, _run(case, _plan(case, problem), problem, quantized), quantized, measure)


@needs("gemm", selections.mx_gemms)
def test_long_odd_sums(case: Case, rng: Rng, full: bool, measure: Measure) -> None:
    """The same of odd length, between odd sides (faults 24, 25)."""
    problem = _long_problem(case, rng, 16_401 if full else 1_057, (41, 33))
    quantized = _quantized(case, problem)
    assert_product(case, problem, _run(case, _plan(case, problem), problem, quantized), quantized, measure)


@needs("gemm", selections.gemms)
def test_one_group_at_a_time(case: Case, rng: Rng, measure: Measure) -> None:
    """All rows in the first group, in the last, in a middle one; one row only (faults 6, 13, 19)."""
    for group, size in ((0, 129), (MAIN[3] - 1, 128), (2, 1)):
        sizes = np.zeros(MAIN[3], dtype=np.int32)
        sizes[group] = size
        problem = draw_problem(rng, case.dtype, sizes=sizes)
        quantized = _quantized(case, problem)
        actual = _run(case, _plan(case, problem), problem, quantized)
        assert_product(case, problem, actual, quantized, measure)


@needs("gemm", selections.gemms)
def test_gemm_repeats_bitwise(case: Case, rng: Rng, full: bool) -> None:
    """The same operands give the same bits (product: deterministic by default; faults 22, 30, 33)."""
    problem = draw_problem(rng, case.dtype)
    quantized = _quantized(case, problem)
    plan = _plan(case, problem)
    first = _run(case, plan, problem, quantized)
    for _ in range(100 if full else 2):
        assert_same_bits(_run(case, plan, problem, quantized), first, f"{case.gemm}, repeated")
