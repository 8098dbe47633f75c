"""Codes and scales equal the definition's, bit for bit (product: one recipe, one set of bits)."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from octavo import QuantizerSpec
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs, needs_the_rest
from octavo_conformance.oracles.checks import assert_same_bits, assert_same_tensor, read_back
from octavo_conformance.oracles.quantizing import COLUMNS, GROUPS, ROWS, arguments_for, as_given, pair, sizes_for
from octavo_conformance.problems.case import Case, Examples
from octavo_conformance.problems.inputs import (
    DTYPES,
    INTERESTING_SIZES,
    NORMAL_CLASSES,
    Rng,
    draw,
    draw_mixed,
    draw_sizes,
)
from octavo_conformance.problems.operands import MAIN, to_framework
from octavo_numerics import dequantize, quantize, valid


def _compare(case: Case, rng: Rng, classes: tuple[str, ...], repeats: int) -> None:
    for _ in range(repeats):
        sizes = sizes_for(rng)
        x = draw_mixed(rng, sizes, ROWS, COLUMNS, case.dtype, case.spec.format, classes)
        assert_same_tensor(case, *pair(case, x, sizes, **arguments_for(case.spec, rng, GROUPS)))


@needs("quantize", selections.ragged)
def test_bits(case: Case, rng: Rng, full: bool) -> None:
    """Both planes on ragged rows: each group another class of values, empty groups and a tail among them
    (faults 6, 56 and 59: an empty group shifts no scale, scales keep their kind, there are 3 blocks of 128)."""
    _compare(case, rng, NORMAL_CLASSES, 12 if full else 3)


@needs("quantize", selections.narrow)
def test_bits_of_narrow_inputs(case: Case, rng: Rng) -> None:
    """bf16 and fp16 inputs convert to fp32 exactly before anything else."""
    _compare(case, rng, NORMAL_CLASSES, 2)


@needs_the_rest("quantize")
def test_bits_of_what_else_is_declared(case: Case, rng: Rng) -> None:
    """Recipes and dtypes that the card declares and the selection leaves out: whatever is declared is tried."""
    _compare(case, rng, NORMAL_CLASSES, 1)


@needs("quantize", selections.one_per_scaling)
def test_bits_of_subnormal_inputs(case: Case, rng: Rng) -> None:
    """Subnormal inputs are preserved, not flushed: alone in a group, and among normal values."""
    _compare(case, rng, ("subnormal", "wide"), 2)


@needs("quantize", selections.one_per_scaling)
def test_bits_where_scales_turn(case: Case, rng: Rng) -> None:
    """The largest value is the largest code times a power of two, or one ulp beside it: a rule by exact arithmetic,
    not by a logarithm."""
    _compare(case, rng, ("edges",), 1)


@needs("quantize", selections.one_per_scaling)
def test_bits_with_sizes_of_either_width(case: Case, rng: Rng) -> None:
    """Sizes are integers of 32 or of 64 bits, as callers have them, on the rows' device: the same bits."""
    sizes = sizes_for(rng)
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    arguments = arguments_for(case.spec, rng, GROUPS)
    plan = case.plan("quantize", k=COLUMNS, groups=GROUPS)
    expected = quantize(x, case.spec, sizes, **arguments)
    for width in (np.int32, np.int64):
        given = case.array(sizes.astype(width))
        tensor = plan.run(case.array(x), given, operand=case.spec.role, **as_given(case, arguments))
        assert_same_tensor(case, tensor, expected, f"{np.dtype(width)} sizes: ")


@needs("quantize", selections.one_per_scaling)
def test_bits_of_no_rows(case: Case, rng: Rng) -> None:
    """A batch without a row has codes of no row, and scales of groups that are all empty."""
    sizes, x = np.zeros(GROUPS, dtype=np.int32), np.zeros((0, COLUMNS), dtype=DTYPES[case.dtype])
    assert_same_tensor(case, *pair(case, x, sizes, **arguments_for(case.spec, rng, GROUPS)))


@needs("quantize", selections.ragged)
def test_bits_of_non_finite_inputs(case: Case, rng: Rng) -> None:
    """NaN and Inf poison their scaling unit and no other: every code of the unit is the NaN code."""
    _compare(case, rng, ("nonfinite", "gauss"), 2)


@needs("quantize", selections.stacked)
def test_bits_of_stacked_weights(case: Case, rng: Rng, full: bool) -> None:
    """[G, N, K] matrices, each a group of its own; N and K leave block tails."""
    _, K, N, groups = MAIN
    for _ in range(8 if full else 2):
        w = draw(rng, (groups, N, K), case.dtype)
        for group, name in enumerate(rng.choice(NORMAL_CLASSES, groups)):
            w[group] = draw(rng, (N, K), case.dtype, str(name), case.spec.format)
        assert_same_tensor(case, *pair(case, w, None, **arguments_for(case.spec, rng, groups)))


@needs("quantize", selections.few_quantizers)
def test_bits_with_column_tails(case: Case, rng: Rng, full: bool) -> None:
    """K that is not a multiple of any block (faults 24, 25), few rows (fault 17), one group with a tail (fault 13)."""
    shapes = [(19, 77, 1)]
    if full:
        shapes += [(1, 1, 1), (7, 545, 2), (130, 129, 3), (65, 33, 1), (64, 15, 2)]
    for rows, columns, groups in shapes:
        sizes = np.minimum(draw_sizes(rng, groups, max(rows - 2, 1)), rows)
        x = draw(rng, (rows, columns), case.dtype)
        assert_same_tensor(case, *pair(case, x, sizes, **arguments_for(case.spec, rng, groups)))


@needs("quantize", selections.few_quantizers)
def test_bits_of_many_groups(case: Case, rng: Rng, full: bool) -> None:
    """More groups than rows, and more than 64 and, in the full selection, more than 1 000 (product: int64 inside)."""
    groups = 1100 if full else 70
    sizes = np.where(rng.random(groups) < 0.5, 0, rng.integers(0, 4, groups)).astype(np.int32)
    rows = int(sizes.sum()) + 3
    x = draw(rng, (rows, 48), case.dtype)
    assert_same_tensor(case, *pair(case, x, sizes, **arguments_for(case.spec, rng, groups)))


@needs("quantize", selections.one_per_scaling)
def test_bits_for_any_group_sizes(case: Case, rng: Rng, examples: Examples) -> None:
    """Sizes on both sides of every block edge, empty groups first, last, in the middle and everywhere
    (faults 6, 15, 16 and 19: unaligned sizes give right codes, a one-row group too)."""
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    arguments = arguments_for(case.spec, rng, GROUPS)

    @given(st.lists(st.sampled_from(INTERESTING_SIZES), min_size=GROUPS, max_size=GROUPS))
    def check(drawn: list[int]) -> None:
        sizes = np.array(drawn, dtype=np.int32)
        while sizes.sum() > ROWS:
            sizes[int(np.argmax(sizes))] = 0
        assert_same_tensor(case, *pair(case, x, sizes, **arguments), what=f"sizes {sizes.tolist()}: ")

    examples(check)


@needs("quantize", selections.few_quantizers)
def test_one_plane_has_the_bits_it_has_beside_the_other(case: Case, rng: Rng, full: bool) -> None:
    """orientation "rowwise" or "columnwise" alone gives the same plane as "both" and no other."""
    sizes = sizes_for(rng)
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    arguments = arguments_for(case.spec, rng, GROUPS)
    made = case.spec.directions
    for orientation in made if full else (str(rng.choice(made)),):
        spec = QuantizerSpec(**(case.spec.model_dump() | {"orientation": orientation}))
        assert_same_tensor(case, *pair(case, x, sizes, spec=spec, **arguments))


@needs("quantize", selections.few_quantizers, sizes="host")
def test_sizes_may_be_a_list(case: Case, rng: Rng) -> None:
    """A Python list of sizes gives the bits that a framework array of them gives; no sizes: all rows are one group."""
    sizes = sizes_for(rng)
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    arguments = arguments_for(case.spec, rng, GROUPS)
    _, expected = pair(case, x, sizes, **arguments)
    as_list = [int(size) for size in sizes]
    assert_same_tensor(case, case.quantize(x, as_list, **arguments), expected)


@needs("quantize", selections.bf16_rows)
def test_bits_of_transposed_inputs(case: Case, rng: Rng) -> None:
    """An input that was a transposed, strided view holds the same values (fault 44)."""
    sizes = sizes_for(rng)
    x = np.ascontiguousarray(draw(rng, (ROWS, COLUMNS), case.dtype).T)
    arguments = arguments_for(case.spec, rng, GROUPS)
    view = case.array(x).T
    _, expected = pair(case, x.T, sizes, **arguments)
    scale = arguments.pop("scale", None)
    with case.admitted(k=COLUMNS):
        tensor = case.bridge.quantize(
            view,
            case.spec,
            case.sizes(sizes),
            backend=case.backend,
            scale=None if scale is None else case.array(scale),
            **arguments,
        )
    assert_same_tensor(case, tensor, expected)


@needs("dequantize", selections.one_per_scaling)
def test_dequantized_bits(case: Case, rng: Rng) -> None:
    """dequantize gives the definition's fp32 values of either plane: one product, every NaN 0x7FC00000, zeros past the
    sum; and of weights, where these are served."""
    sizes = sizes_for(rng)
    x = draw_mixed(rng, sizes, ROWS, COLUMNS, case.dtype, case.spec.format, ("gauss", "wide", "nonfinite"))
    for direction in case.spec.directions:
        spec = QuantizerSpec(**(case.spec.model_dump() | {"orientation": direction, "hadamard": False}))
        expected = quantize(x, spec, sizes, **arguments_for(spec, rng, GROUPS))
        plan = case.plan("dequantize", quantizer=spec, out_dtype="float32", k=COLUMNS, groups=GROUPS)
        values = case.numpy(plan.run(to_framework(case, expected, case.sizes(sizes)), direction))
        assert_same_bits(values, dequantize(expected, direction), f"dequantized {direction} values")


@needs("dequantize", selections.stacked)
def test_dequantized_bits_of_weights(case: Case, rng: Rng) -> None:
    """The same of stacked matrices, in both planes."""
    _, K, N, groups = MAIN
    w = draw(rng, (groups, N, K), case.dtype, "wide")
    expected = quantize(w, case.spec, None, **arguments_for(case.spec, rng, groups))
    plan = case.plan("dequantize", quantizer=case.spec, out_dtype="float32", k=K, groups=groups)
    for direction in case.spec.directions:
        values = case.numpy(plan.run(to_framework(case, expected, None), direction))
        assert_same_bits(values, dequantize(expected, direction), f"dequantized {direction} values of weights")


@needs("quantize", selections.stochastic)
def test_same_seed_same_bits(case: Case, rng: Rng) -> None:
    """One seed repeats, two seeds differ, and seeds count modulo 2^64 (faults 39, 40, 41)."""
    sizes = sizes_for(rng)
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    seed = int(rng.integers(2**62))
    first, expected = pair(case, x, sizes, seed=seed)
    planes = valid(read_back(case, first, expected))
    again = valid(read_back(case, case.quantize(x, sizes, seed=seed + 2**64), expected))
    other = valid(read_back(case, case.quantize(x, sizes, seed=seed + 2**32), expected))
    for name, plane in planes.items():
        assert_same_bits(again[name], plane, f"{name} with the same seed")
    for name in case.spec.directions:
        assert planes[name].any(), f"{name} is all zeros"
        differ = float(np.mean(planes[name] != other[name]))
        assert differ > 0.02, f"{name}: two seeds differ in {differ:.1%} of the codes"


@needs("quantize", selections.stochastic)
def test_stochastic_bits_for_any_seed_operand_and_group(case: Case, rng: Rng, examples: Examples) -> None:
    """Philox's counter holds the operand, the group with its offset, and the position; the key both seed halves."""
    sizes = sizes_for(rng)
    x = draw(rng, (ROWS, COLUMNS), case.dtype)

    operand = str(rng.choice(["x", "w", "dy"]))

    # Hypothesis is fond of zeros, with which a seed or an offset that is lost makes no difference.
    @example(seed=0, group_offset=0)
    @given(seed=st.integers(1, 2**64 - 1), group_offset=st.integers(1, 2**32 - GROUPS))
    def check(seed: int, group_offset: int) -> None:
        assert_same_tensor(case, *pair(case, x, sizes, seed=seed, operand=operand, group_offset=group_offset))

    examples(check)


@needs("quantize", selections.stochastic)
def test_stochastic_rounding_has_the_right_mean(case: Case, rng: Rng, full: bool) -> None:
    """The mean over seeds is x where x is in range: it is rounding, not noise, and not a constant (fault 39)."""
    sizes = np.array([64, 0, 0, 0, 0, 0], dtype=np.int32)
    x = np.zeros((ROWS, COLUMNS), dtype=DTYPES[case.dtype])
    x[:64] = draw(rng, (64, COLUMNS), case.dtype)
    repeats = 64 if full else 12
    total = np.zeros((64, COLUMNS))
    for _ in range(repeats):
        tensor, expected = pair(case, x, sizes, seed=int(rng.integers(2**62)))
        total += dequantize(read_back(case, tensor, expected), "rowwise")[:64]
    error = total / repeats - x[:64].astype(np.float64)
    step = np.abs(x[:64]).max() / 6 * 2  # the widest step of E2M1, next to the largest value
    deviation = step / 2 / np.sqrt(repeats * error.size)
    assert abs(error.mean()) < 6 * deviation + 1e-3 * step, f"mean error {error.mean():.2e}, deviation {deviation:.2e}"
