"""Planes equal octavo_numerics bit for bit, in every layout; dequantized values too (contract.md, promise 5)."""

from __future__ import annotations

from typing import Any

import native_calls as native
import numpy as np
import pytest
import torch

import octavo_native
import octavo_numerics
from octavo import QuantizerSpec
from octavo_conformance.cards.variants import RAGGED, STACKED
from octavo_torch import quantize
from octavo_torch.bridge import BRIDGE

DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = (("plain", "plain"), ("rows", "panels"), ("plain", "panels"), ("rows", "plain"))

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_rows_equal_the_definition(name: str, layouts: tuple[str, str], problem: Any, same: Any) -> None:
    """Ragged sizes, empty groups, NaN tails, every kind of value and dtype (faults 6, 14, 15, 56, 59, 64)."""
    for dtype in DTYPES:
        drawn = problem(RAGGED[name], dtype=dtype)
        q = native.quantize(drawn.tensor(), drawn.spec, drawn.group_sizes(), layouts=layouts, **drawn.arguments()).codes
        assert (q.spec.rowwise_layout, q.spec.columnwise_layout) == layouts
        same(q, drawn.expected(), f"{name} {layouts}: {drawn}")


@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("name", STACKED)
def test_stacked_matrices_equal_the_definition(name: str, layouts: tuple[str, str], problem: Any, same: Any) -> None:
    """Each matrix is its own group; all in one call (fault 59: grids that are not square)."""
    for rows in (1, 48, 144, 160):
        drawn = problem(STACKED[name], dtype="bfloat16", stacked=True, rows=rows, groups=3)
        q = native.quantize(drawn.tensor(), drawn.spec, layouts=layouts, **drawn.arguments()).codes
        same(q, drawn.expected(), f"{name} {layouts}: {drawn}")


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", RAGGED)
def test_one_plane_alone(name: str, orientation: str, problem: Any, same: Any) -> None:
    """Plain and native, through the front end and through this package."""
    spec = QuantizerSpec(**{**dict(RAGGED[name]), "orientation": orientation})
    drawn = problem(spec)
    x, sizes, given, expected = drawn.tensor(), drawn.group_sizes(), drawn.arguments(), drawn.expected()
    same(quantize(x, spec, sizes, backend="torch-native", **given), expected, f"{name}: {drawn}")
    same(native.quantize(x, spec, sizes, layouts=("rows", "panels"), **given).codes, expected, f"{name}: {drawn}")


@pytest.mark.parametrize("name", RAGGED)
def test_shared_codes_are_one_tensor(name: str, problem: Any) -> None:
    """Plain data of both directions share where the reference shares; native planes are each their own."""
    drawn = problem(RAGGED[name])
    x, sizes, given = drawn.tensor(), drawn.group_sizes(), drawn.arguments()
    plain = quantize(x, drawn.spec, sizes, backend="torch-native", **given)
    reference = quantize(x, drawn.spec, sizes, backend="torch-reference", **given)
    for part in ("", "_scale"):
        shared = getattr(reference, f"rowwise{part}") is getattr(reference, f"columnwise{part}")
        assert (getattr(plain, f"rowwise{part}") is getattr(plain, f"columnwise{part}")) == shared
    physical = native.quantize(x, drawn.spec, sizes, layouts=("rows", "panels"), **given).codes
    assert physical.rowwise is not physical.columnwise


@pytest.mark.parametrize("layouts", LAYOUTS[:2], ids="-".join)
@pytest.mark.parametrize("name", RAGGED)
def test_dequantized_values(name: str, layouts: tuple[str, str], problem: Any) -> None:
    """fp32 values are the definition's, zeros past the sum; bf16 and fp16 are those rounded once."""
    drawn = problem(RAGGED[name], kinds=("gauss", "wide", "nonfinite", "zeros"))
    q = native.quantize(drawn.tensor(), drawn.spec, drawn.group_sizes(), layouts=layouts, **drawn.arguments()).codes
    expected = drawn.expected()
    for direction in ("rowwise", "columnwise"):
        values = native.dequantize(q, direction)
        want = torch.from_numpy(octavo_numerics.dequantize(expected, direction))
        assert torch.equal(values.view(torch.int32), want.view(torch.int32)), f"{direction}: {drawn}"
        for dtype in (torch.bfloat16, torch.float16):
            rounded = native.dequantize(q, direction, dtype=dtype)
            finite = want.to(dtype)
            assert torch.equal(rounded.isnan(), want.isnan())
            assert torch.equal(rounded[~want.isnan()].view(torch.int16), finite[~want.isnan()].view(torch.int16))


@pytest.mark.parametrize("name", [name for name in RAGGED if not RAGGED[name].hadamard])
def test_panels_are_zero_past_a_groups_end(name: str, problem: Any) -> None:
    """Rows of a panel past its group's end are zero codes in poisoned memory: a product may read them (fault 1)."""
    drawn = problem(RAGGED[name], columns=40)
    q = native.quantize(
        drawn.tensor(), drawn.spec, drawn.group_sizes(), layouts=("rows", "panels"), **drawn.arguments()
    ).codes
    panels = q.columnwise.view(torch.uint8)
    per_byte = 2 if drawn.spec.format == "e2m1" else 1
    first = 0
    for size in drawn.sizes.tolist():
        for start in range(0, size, 128):
            rows = min(size - start, 128)
            tail = panels[first, :, -(-rows // per_byte) :]
            assert not tail.any(), f"panel {first} holds codes past row {rows}: {drawn}"
            if rows % per_byte:
                assert not (panels[first, :, rows // per_byte] >> 4).any()
            first += 1


@pytest.mark.parametrize("name", ["current.e4m3", "row.e4m3.pow2", "block.e4m3.fp32", "mxfp8.e4m3", "nvfp4"])
def test_conversions_there_and_back(name: str, problem: Any, same: Any) -> None:
    """Plain to native to plain changes no valid bit, ragged and stacked."""
    for stacked in (False, True):
        drawn = problem(RAGGED[name], stacked=stacked, rows=144)
        plain = native.quantize(drawn.tensor(), drawn.spec, drawn.group_sizes(), **drawn.arguments()).codes
        there = native.convert(plain, ("rows", "panels"))
        straight = native.quantize(
            drawn.tensor(), drawn.spec, drawn.group_sizes(), layouts=("rows", "panels"), **drawn.arguments()
        ).codes
        assert there.spec == straight.spec
        assert there.columnwise.shape == straight.columnwise.shape
        same(there, drawn.expected(), f"{name}: {drawn}")


@pytest.mark.parametrize("shape", [(0, 32), (8, 0), (0, 0)])
@pytest.mark.parametrize("layouts", LAYOUTS[:2], ids="-".join)
@pytest.mark.parametrize("name", [name for name in RAGGED if not RAGGED[name].stochastic])
def test_empty_operands(name: str, layouts: tuple[str, str], shape: tuple[int, int], same: Any) -> None:
    """No rows or no columns: planes of the right shapes whose scales are those of nothing."""
    spec = RAGGED[name]
    sizes = [0, shape[0]]
    x = np.zeros(shape, np.float32)
    given = {"scale": np.ones(2, np.float32)} if spec.scaling == "delayed" else {}
    q = native.quantize(
        torch.from_numpy(x), spec, sizes, layouts=layouts, **{k: torch.from_numpy(v) for k, v in given.items()}
    ).codes
    same(q, octavo_numerics.quantize(x, spec, sizes, **given))


@pytest.mark.parametrize("name", STACKED)
def test_matrices_without_rows(name: str, same: Any) -> None:
    """[G, 0, K]: scales of whole matrices are there, everything else is empty."""
    spec = STACKED[name]
    w = np.zeros((3, 0, 40), np.float32)
    given = {"scale": np.ones(3, np.float32)} if spec.scaling == "delayed" else {}
    q = native.quantize(torch.from_numpy(w), spec, **{k: torch.from_numpy(v) for k, v in given.items()}).codes
    same(q, octavo_numerics.quantize(w, spec, **given))


@pytest.mark.parametrize("seed", [0, -1, (1 << 64) - 1, 1 << 63, (1 << 70) + 5])
def test_seeds_are_taken_modulo_two_to_the_64(seed: int, rng: np.random.Generator, same: Any) -> None:
    """An integer and an int64 scalar of the same bits draw the same random bits (faults 39, 40, 41)."""
    spec, x = RAGGED["nvfp4.stochastic"], torch.randn(40, 48)
    expected = octavo_numerics.quantize(x.numpy(), spec, seed=seed)
    wrapped = torch.tensor((seed + (1 << 63)) % (1 << 64) - (1 << 63))
    for form in (seed, wrapped, wrapped.reshape(1)):
        same(native.quantize(x, spec, seed=form).codes, expected, str(seed))


def test_a_group_computed_alone_gets_the_same_bits(rng: np.random.Generator) -> None:
    """Random bits depend on position and group number alone (faults 40, 41)."""
    spec, x = RAGGED["nvfp4.stochastic"], torch.randn(60, 64)
    both = native.quantize(x, spec, [20, 0, 40], seed=7, group_offset=3).codes
    alone = native.quantize(x[20:], spec, [40], seed=7, group_offset=5).codes
    assert torch.equal(both.rowwise[20:60], alone.rowwise[:40])
    assert not torch.equal(both.rowwise, native.quantize(x, spec, [20, 0, 40], seed=8, group_offset=3).codes.rowwise)
    assert not torch.equal(both.rowwise, native.quantize(x, spec, [20, 0, 40], seed=7, group_offset=4).codes.rowwise)


@pytest.mark.parametrize("name", ["block.e4m3.fp32", "nvfp4.stochastic.hadamard", "row.e5m2.pow2.eps"])
def test_bits_do_not_depend_on_threads(name: str, problem: Any) -> None:
    """One thread, two, five: the same bytes, the poison past the sum aside."""
    drawn = problem(RAGGED[name], rows=700, columns=272, groups=7)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            q = native.quantize(drawn.tensor(), drawn.spec, drawn.group_sizes(), **drawn.arguments()).codes
            results.append([BRIDGE.to_numpy(native.dequantize(q, d)).tobytes() for d in ("rowwise", "columnwise")])
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def test_the_plan_has_room_for_its_words(rng: np.random.Generator) -> None:
    """The compiled word count is the Python one, which fake kernels use."""
    for rows, groups in rng.integers(1, 5000, (50, 2)).tolist():
        made = native.plan([0] * groups, rows)
        assert made.words.numel() == octavo_native.layouts.plan_words(rows, groups)
