"""CUDA's grouped GEMMs within the bounds of their sums, on every tile.

Operands come from the definition. What no layout defines, what no group holds, workspaces and results are NaN before
each call. These tests skip where there is no device.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from devices import needs_device

pytest.importorskip("torch", reason="torch holds the memory of the device")

from device_gemms import Prepared
from gemm_kinds import RAGGED, WEIGHTS, accumulation, every_kind, kinds, tiles
from gemm_problems import SIZES, Case, make_problem, quantized_cases, random_values, unquantized_cases
from problems import CUDA

pytestmark = [
    needs_device,
    pytest.mark.usefixtures("poison", "no_errors_left"),
]

DTYPES_16 = ("bfloat16", "float16")

ODD_SIDES = (
    *((144, 272), (16, 16), (80, 528), (272, 144), (768, 48), (48, 768), (640, 384), (32, 2064)),
    *((48, 4240), (4240, 48)),
)
"""(N, K): multiples of 16 that are none of 64, 128 or 256, and of 128 alone; one below a tile, one step past one; more
K-blocks than a warp has lanes."""


def check(prepared: Prepared) -> None:
    """Within the bound, and the same bits on every tile: each element is summed in one order, whatever the tile."""
    problem = prepared.problem
    first = prepared.result()
    for tile in tiles(prepared):
        out = prepared.result(tile)
        same = np.array_equal(out.view(np.uint8), first.view(np.uint8))
        if same and tile >= 0:
            continue
        name = "the chosen tile" if tile < 0 else prepared.gemm.tiles()[tile]
        found = problem.complaints(out, accumulation(problem.case))
        assert not found, f"{name}, sizes {problem.sizes}, N {problem.n}, K {problem.k}: {found[0]}"
        assert same, f"{name}: other bits than those of the call before, within the bound"


@pytest.mark.parametrize("case", quantized_cases() + unquantized_cases(DTYPES_16, (*DTYPES_16, "float32")), ids=str)
def test_every_scaling_and_format_is_within_its_bound(rng: np.random.Generator, case: Case) -> None:
    """All pairs of formats, square weights, Hadamard data, dtypes; ragged groups, a NaN tail (faults.md 3, 8, 12)."""
    check(Prepared(make_problem(rng, case, RAGGED, 144, 272, tail=21), CUDA))


@pytest.mark.parametrize(("n", "k"), ODD_SIDES)
@every_kind
def test_sides_that_fill_no_tile(rng: np.random.Generator, case: Case, n: int, k: int) -> None:
    """They leave part of a tile, of a step along K and of a scale's block (faults.md 20, 24, 25, 59)."""
    check(Prepared(make_problem(rng, case, (70, 0, 129), n, k, tail=3), CUDA))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@every_kind
def test_sizes_of_every_kind(rng: np.random.Generator, case: Case, sizes: tuple[int, ...]) -> None:
    """One group, empty ones, negative ones, a sum past M, with a tail and without (faults.md 1 to 6, 16, 61)."""
    for tail in (0, 21):
        check(Prepared(make_problem(rng, case, sizes, 80, 144, tail=tail), CUDA))


@every_kind
def test_groups_of_1_to_130_rows(rng: np.random.Generator, case: Case) -> None:
    """Every remainder of a tile's rows, in random order (faults.md 17, 19)."""
    sizes = tuple(int(size) for size in rng.permutation(np.arange(1, 131)))
    check(Prepared(make_problem(rng, case, sizes, 48, 80, tail=5), CUDA))


@every_kind
def test_1024_groups(rng: np.random.Generator, case: Case) -> None:
    """More groups than rows, most of them empty (faults.md 6)."""
    sizes = tuple(int(size) for size in rng.choice([0, 0, 0, 1, 2], 1024))
    check(Prepared(make_problem(rng, case, sizes, 48, 80, tail=5), CUDA))


@every_kind
def test_operands_without_rows(rng: np.random.Generator, case: Case) -> None:
    """M = 0, where frameworks give null pointers: nothing but wgrad's zeros is written (faults.md 6)."""
    check(Prepared(make_problem(rng, case, (0, 0), 64, 48, tail=0), CUDA))


@every_kind
def test_what_a_group_holds_stays_in_it(rng: np.random.Generator, case: Case) -> None:
    """NaN in a row of one group reaches no other group, and no further than the definition says (faults.md 11, 14)."""
    sizes, n, k = (60, 70, 65), 80, 144
    columns = k if case.gemm == "fprop" else n
    left = random_values(rng, (sum(sizes) + 9, columns), case.dtype)
    left[60 + int(rng.integers(0, 70)), int(rng.integers(0, columns))] = np.nan
    prepared = Prepared(make_problem(rng, case, sizes, n, k, tail=9, left=left), CUDA)
    check(prepared)
    assert np.isnan(prepared.result().astype(np.float32)).any()


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_weight_gradients_are_added_to_what_there_is(rng: np.random.Generator, case: Case, out_dtype: str) -> None:
    """In fp32, rounded once; a group without rows keeps its bits, -0 among them (faults.md 1, 7)."""
    case = replace(case, accumulate=True, out_dtype=out_dtype)
    problem = make_problem(rng, case, RAGGED, 144, 272, tail=21)
    assert problem.accumulator is not None
    problem.accumulator[0, :, ::3] = -0.0
    check(Prepared(problem, CUDA))


@pytest.mark.parametrize("bias_scales", [False, True])
@pytest.mark.parametrize("bias", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", kinds("fprop") + kinds("dgrad"), ids=str)
def test_biases_are_added_before_the_rounding(
    rng: np.random.Generator, case: Case, bias: str, bias_scales: bool
) -> None:
    """Each group's own bias, times the row's scale where there are scales; the tail stays +0.

    dgrad's is the bias of a layer whose weight lies as [G, K, N].
    """
    problem = make_problem(rng, case, RAGGED, 144, 80, tail=21, bias=bias, bias_scales=bias_scales)
    if problem.bias_scales is not None:
        problem.bias_scales[sum(problem.real) :] = np.nan
    check(Prepared(problem, CUDA))


@every_kind
def test_results_with_strides(rng: np.random.Generator, case: Case) -> None:
    """Rows and matrices apart: what lies between them is not written (faults.md 58). Unquantized operands likewise."""
    strides = {"left_stride": 296, "right_stride": 312} if case.scaling is None else {}
    problem = make_problem(rng, case, RAGGED, 144, 272, tail=21, **strides)
    check(Prepared(problem, CUDA, gap=24, group_gap=40 if case.gemm == "wgrad" else 0))
