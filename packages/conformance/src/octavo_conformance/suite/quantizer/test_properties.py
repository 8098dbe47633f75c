"""Metamorphic properties of quantizers: what must not depend on what (docs/numerics, "Properties")."""

from __future__ import annotations

import numpy as np

from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_equal, assert_same_bits
from octavo_conformance.oracles.quantizing import COLUMNS, GROUPS, ROWS, arguments_for, decoded, quantized, sizes_for
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import Array, Rng, draw, draw_sizes, offsets
from octavo_numerics import valid
from octavo_numerics.casts import decode

SIZES = np.array([33, 0, 128, 1, 17, 129], dtype=np.int32)
TOTAL = int(SIZES.sum())


def _rows(values: Array, sizes: Array, group: int) -> Array:
    starts = offsets(sizes)
    return values[int(starts[group]) : int(starts[group + 1])]


@needs("quantize", selections.unrounded)
def test_sign_symmetry(case: Case, rng: Rng) -> None:
    """q(-x) = -q(x): the same scales, codes with the sign bit turned."""
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    arguments = arguments_for(case.spec, rng, GROUPS)
    plus, minus = (decoded(quantized(case, value, SIZES, **arguments)) for value in (x, -x))
    for direction, values in plus.items():
        assert_equal(minus[direction], -values, f"{direction}: q(-x) is not -q(x)")


@needs("quantize", selections.self_scaled)
def test_scaling_by_four(case: Case, rng: Rng) -> None:
    """q(4x) = 4 q(x), delayed scaling and an amax floor aside: the scale takes all of a power of two."""
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    arguments = arguments_for(case.spec, rng, GROUPS)
    one, four = (decoded(quantized(case, value, SIZES, **arguments)) for value in (x, x * x.dtype.type(4)))
    for direction, values in one.items():
        assert_equal(four[direction], 4 * values, f"{direction}: q(4x) is not 4 q(x)")


@needs("quantize", selections.one_per_scaling)
def test_group_locality(case: Case, rng: Rng) -> None:
    """A group's codes do not see the other groups, huge values and NaN there included (fault 14)."""
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    arguments = arguments_for(case.spec, rng, GROUPS)
    changed = x.copy()
    starts = offsets(SIZES)
    for group in (0, 2, 5):
        rows = slice(int(starts[group]), int(starts[group + 1]))
        changed[rows] = draw(rng, (int(SIZES[group]), COLUMNS), case.dtype, "huge")
        changed[rows.start] = np.nan
    before, after = (decoded(quantized(case, value, SIZES, **arguments)) for value in (x, changed))
    for direction in before:
        aligned = direction == "columnwise" and case.spec.hadamard
        sizes = -(-SIZES // 16) * 16 if aligned else SIZES
        for group in (3, 4):
            assert_same_bits(
                _rows(after[direction], sizes, group),
                _rows(before[direction], sizes, group),
                f"{direction} of group {group}",
            )


@needs("quantize", selections.positional)
def test_a_group_alone_with_its_offset(case: Case, rng: Rng) -> None:
    """A group computed alone, with `group_offset`, has the bits that it has among the others."""
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    arguments = arguments_for(case.spec, rng, GROUPS)
    together = decoded(quantized(case, x, SIZES, **arguments))
    group = int(rng.choice(np.flatnonzero(SIZES)[1:]))
    starts = offsets(SIZES)
    alone_x = np.zeros_like(x)
    alone_x[: SIZES[group]] = x[int(starts[group]) : int(starts[group + 1])]
    alone_sizes = np.zeros_like(SIZES)
    alone_sizes[0] = SIZES[group]
    if "scale" in arguments:
        arguments["scale"] = np.roll(arguments["scale"], -group)
    alone = decoded(quantized(case, alone_x, alone_sizes, group_offset=group, **arguments))
    for direction in together:
        aligned = direction == "columnwise" and case.spec.hadamard
        sizes = -(-SIZES // 16) * 16 if aligned else SIZES
        mine = _rows(together[direction], sizes, group)
        assert_same_bits(alone[direction][: len(mine)], mine, f"{direction} of group {group} alone")


@needs("quantize", selections.one_per_scaling)
def test_padding_invariance(case: Case, rng: Rng) -> None:
    """Zero rows at a group's end change no code of a real row (fault 64); Hadamard columns aside, whose padding is
    part of the operand."""
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    arguments = arguments_for(case.spec, rng, GROUPS)
    plain = decoded(quantized(case, x, SIZES, **arguments))
    padded_sizes = np.where(SIZES > 0, SIZES + 15, 0).astype(np.int32)
    padded_x = np.zeros((ROWS, COLUMNS), dtype=x.dtype)
    old, new = offsets(SIZES), offsets(padded_sizes)
    for group, size in enumerate(SIZES):
        padded_x[int(new[group]) : int(new[group]) + size] = x[int(old[group]) : int(old[group]) + size]
    padded = decoded(quantized(case, padded_x, padded_sizes, **arguments))
    for direction in plain:
        if direction == "columnwise" and case.spec.hadamard:
            continue
        for group, size in enumerate(SIZES):
            mine = _rows(plain[direction], SIZES, group)
            theirs = padded[direction][int(new[group]) : int(new[group]) + size]
            assert_same_bits(theirs, mine, f"{direction} of group {group} with 15 rows of padding")


@needs("quantize", selections.unrounded)
def test_order_and_empty_groups(case: Case, rng: Rng) -> None:
    """Groups in another order, with empty ones elsewhere, have the same codes: no index counts non-empty groups only
    (fault 6)."""
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    arguments = arguments_for(case.spec, rng, GROUPS)
    busy, empty = rng.permutation(np.flatnonzero(SIZES)), np.flatnonzero(SIZES == 0)
    order = np.concatenate([empty, busy] if rng.random() < 0.5 else [busy, empty])  # SIZES has its empty group inside
    starts = offsets(SIZES)
    moved_x = x.copy()
    moved_x[:TOTAL] = np.concatenate([x[int(starts[g]) : int(starts[g + 1])] for g in order])
    moved_arguments = dict(arguments)
    if "scale" in arguments:
        moved_arguments["scale"] = arguments["scale"][order]
    plain = decoded(quantized(case, x, SIZES, **arguments))
    moved = decoded(quantized(case, moved_x, SIZES[order], **moved_arguments))
    for direction in plain:
        aligned = direction == "columnwise" and case.spec.hadamard
        sizes = -(-SIZES // 16) * 16 if aligned else SIZES
        for place, group in enumerate(order):
            assert_same_bits(
                _rows(moved[direction], sizes[order], place),
                _rows(plain[direction], sizes, int(group)),
                f"{direction} of group {group}, moved to place {place}",
            )


@needs("quantize", selections.row_scaled)
def test_split_invariance(case: Case, rng: Rng) -> None:
    """Where no scale spans rows, one group and the same rows split in six have the same row codes."""
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    whole = np.zeros(GROUPS, dtype=np.int32)
    whole[int(rng.integers(GROUPS))] = TOTAL
    split, one = (valid(quantized(case, x, sizes)) for sizes in (SIZES, whole))
    for name in ("rowwise", "rowwise_scale"):
        assert_same_bits(split[name], one[name], f"{name} of split rows")


@needs("quantize", selections.one_per_scaling)
def test_nan_in_nan_out(case: Case, rng: Rng) -> None:
    """A NaN or Inf is never hidden: its row and column data dequantize to NaN there."""
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    row, column = int(rng.integers(TOTAL)), int(rng.integers(COLUMNS))
    x[row, column] = given = rng.choice([np.nan, np.inf, -np.inf])
    values = decoded(quantized(case, x, SIZES, **arguments_for(case.spec, rng, GROUPS)))
    hidden = f"x[{row}, {column}] is {given}, and no NaN stands for it in"
    assert np.isnan(values["rowwise"][row, column]), f"{hidden} rowwise"
    if "columnwise" in values:
        columns = values["columnwise"]
        there = columns if case.spec.hadamard else columns[row, column]
        assert np.isnan(there).any(), f"{hidden} columnwise"


@needs("quantize", selections.mx)
def test_mx_blocks_do_not_saturate(case: Case, rng: Rng) -> None:
    """The round-up rule leaves every value within the format: the largest error is half a step of its own binade."""
    x = draw(rng, (ROWS, COLUMNS), case.dtype, "wide")
    values = decoded(quantized(case, x, SIZES))
    mantissa = 3 if case.spec.format == "e4m3" else 2
    largest = float(decode(np.array([0x7E if mantissa == 3 else 0x7B], dtype=np.uint8), case.spec.format)[0])
    for direction, plane in values.items():
        exact = x[:TOTAL].astype(np.float64)
        error = np.abs(plane[:TOTAL] - exact)
        big = np.abs(exact) >= np.abs(plane[:TOTAL]).max(axis=1, keepdims=True) / largest * 2
        assert (error[big] <= np.abs(exact[big]) * 2.0 ** -(mantissa + 1)).all(), f"{direction}: a block saturates"


@needs("quantize", selections.one_per_scaling)
def test_poisoned_tail_changes_no_bit(case: Case, rng: Rng) -> None:
    """NaN and Inf past the sum enter no amax and no code (product, promise 2; faults 8, 14)."""
    sizes = draw_sizes(rng, GROUPS, ROWS - 31)
    total = int(sizes.sum())
    clean = draw(rng, (ROWS, COLUMNS), case.dtype)
    clean[total:] = 0
    poisoned = clean.copy()
    poisoned[total:] = rng.choice([np.nan, np.inf, -np.inf], size=(ROWS - total, COLUMNS))
    arguments = arguments_for(case.spec, rng, GROUPS)
    first, second = (valid(quantized(case, x, sizes, **arguments)) for x in (clean, poisoned))
    for name, plane in first.items():
        assert_same_bits(second[name], plane, f"{name} with a poisoned tail")


@needs("quantize", selections.one_per_scaling)
def test_repeats_bitwise(case: Case, rng: Rng, full: bool) -> None:
    """The same input gives the same bits, again and again (faults 22, 30, 32, 41)."""
    sizes = sizes_for(rng)
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    arguments = arguments_for(case.spec, rng, GROUPS)
    first = valid(quantized(case, x, sizes, **arguments))
    for _ in range(50 if full else 2):
        again = valid(quantized(case, x, sizes, **arguments))
        for name, plane in first.items():
            assert_same_bits(again[name], plane, f"{name}, repeated")
