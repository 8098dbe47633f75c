"""Products with a scale per column of the right operand, beside those with a scale per 128 x 128 block: where columns
share their scales, both are the same sums in the same order, by kernels that take another way to them.

These tests skip where there is no device.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from devices import needs_device

pytest.importorskip("torch", reason="torch holds the memory of the device")

from device_gemms import Prepared
from gemm_problems import Array, Case, Problem, Side, make_problem
from problems import CUDA

pytestmark = needs_device

SIZES = (0, 1, 17, 130, 0, 96, 300)
N, K = 400, 1300 // 16 * 16
"""Two tiles across of 256 columns, the last of which is not full; eleven K-blocks, the last of which is not full."""

SCALES = {
    "powers of two": lambda rng, count: np.exp2(rng.integers(-9, -4, count)),
    "all powers of two": lambda rng, count: np.exp2(rng.integers(-149, 128, count)),
    "arbitrary": lambda rng, count: rng.uniform(0.005, 0.025, count),
    "all bits": lambda rng, count: rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32),
    "special": lambda rng, count: rng.choice(
        np.float32([0.0, -0.0, np.nan, np.inf, -np.inf, -0.25, 1.0, 1e-45, 1.2e-38, 3.4e38]), count
    ),
}
"""Of both operands, by what they are; `special` are those that a recipe may have, and some that none has."""


def bits(problem: Problem, tile: int) -> Array:
    """The result's bits."""
    out = Prepared(problem, CUDA).result(tile)
    return out.view(np.uint16 if out.dtype.itemsize == 2 else np.uint32)


def with_column_scales(problem: Problem) -> Problem:
    """The problem with each column's own copy of the scales of its square blocks."""
    groups, down, across = len(problem.sizes), -(-N // 128), -(-K // 128)
    squares = problem.right.arrays["scales"].view(np.float32).reshape(groups, down, across)
    columns = np.repeat(squares, 128, axis=1)[:, :N].reshape(groups * N, across).T
    right = Side({**problem.right.arrays, "scales": np.ascontiguousarray(columns)}, problem.right.values)
    return replace(problem, case=replace(problem.case, right_square=False), right=right)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("left_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", SCALES)
def test_columns_that_share_a_scale_have_the_bits_of_square_blocks(
    rng: np.random.Generator, kind: str, left_format: str, out_dtype: str
) -> None:
    """Scales of every kind on both sides, on every tile: under- and overflow and NaN of the products included."""
    case = Case(gemm="fprop", scaling="block", left_format=left_format, right_square=True, out_dtype=out_dtype)
    problem = make_problem(rng, case, SIZES, N, K, tail=21)
    for side in (problem.left, problem.right):
        scales = side.arrays["scales"].view(np.float32).reshape(-1)
        with np.errstate(all="ignore"):
            scales[:] = SCALES[kind](rng, scales.size)
    own = with_column_scales(problem)
    for tile in range(len(case.native.tiles())):
        same = bits(problem, tile) == bits(own, tile)
        assert same.all(), f"tile {tile}: {np.count_nonzero(~same)} of {same.size} results have other bits"
