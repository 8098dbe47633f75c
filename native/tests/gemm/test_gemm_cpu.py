"""gemm_cpu against float64 products of the dequantized operands, within octavo_numerics.error_bound.

Outputs are poisoned beforehand and lie between guards; rows past the sum, unused panels and the memory between rows are
NaN or poison.
docs/faults: rows 8, 14 (NaN tails), 15, 24, 25 (sizes and sides that are no multiple of a tile), 58 (strides).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cpu_calls import DTYPE
from cpu_gemms import run
from gemm_problems import (
    GEMMS,
    SIZES,
    Case,
    GemmName,
    Problem,
    make_problem,
    quantized_cases,
    random_values,
    unquantized_cases,
)

COLUMNS = (1, 2, 15, 16, 17, 37, 64, 127, 128, 129, 160, 255, 256, 257, 272)
SAMPLES: tuple[Case, ...] = (
    *unquantized_cases(("bfloat16",)),
    *(Case(gemm=gemm, scaling="current", right_format="e5m2") for gemm in GEMMS),
    *(Case(gemm=gemm, scaling="block", right_square=square) for gemm in GEMMS for square in {True, gemm != "wgrad"}),
    Case(gemm="wgrad", scaling="block", left_square=True),
    *(Case(gemm=gemm, scaling="mxfp8", left_format="e5m2") for gemm in GEMMS),
    Case(gemm="dgrad", scaling="nvfp4", left_format="e2m1", right_format="e2m1", right_square=True),
    Case(gemm="wgrad", scaling="nvfp4", left_format="e2m1", right_format="e2m1", hadamard=True),
)
"""One case of each way in which operands are read."""


def check(problem: Problem, *, zero_mean: bool = True, **more: Any) -> np.ndarray:
    """Run it and compare; the result."""
    out = run(problem, **more)
    complaints = problem.complaints(out, zero_mean=zero_mean)
    assert not complaints, f"{problem.case} sizes {problem.sizes} {problem.sides}: " + "; ".join(complaints)
    return out


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """NaN and the sign of zero included."""
    return bool((a.view(np.uint8) == b.view(np.uint8)).all())


@pytest.mark.parametrize("case", quantized_cases(), ids=str)
def test_every_scaling_and_format(case: Case, rng: np.random.Generator) -> None:
    """Codes and scales of every kind multiply as the values that they stand for; scales are no powers of two."""
    for sizes in ((130, 0, 17, 1), (3, 200)):
        n, k = (int(side) for side in rng.choice(COLUMNS, 2))
        check(make_problem(rng, case, sizes, n, k, tail=int(rng.choice([0, 5, 130]))))


@pytest.mark.parametrize("scaling", ["current", "row", "block"])
@pytest.mark.parametrize("gemm", GEMMS)
def test_power_of_two_scales(gemm: GemmName, scaling: str, rng: np.random.Generator) -> None:
    """Scales that are powers of two, as block scaling makes them by default."""
    case = Case(gemm=gemm, scaling=scaling, power_of_two=True, right_square=scaling == "block" and gemm != "wgrad")
    check(make_problem(rng, case, (100, 31), 144, 272, tail=3))


@pytest.mark.parametrize("case", unquantized_cases(out_dtypes=("bfloat16", "float16", "float32")), ids=str)
def test_every_dtype(case: Case, rng: np.random.Generator) -> None:
    """16-bit and fp32 operands with results of every dtype, rounded once."""
    check(make_problem(rng, case, (0, 129, 40), 130, 70, tail=5))


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_1024_groups(case: Case, rng: np.random.Generator) -> None:
    """More groups than rows, most of them empty."""
    sizes = tuple(int(size) for size in rng.choice([0, 0, 0, 1, 2], 1024))
    check(make_problem(rng, case, sizes, 32, 16, tail=3))


@pytest.mark.parametrize("sizes", list(SIZES))
@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_group_sizes(case: Case, sizes: str, rng: np.random.Generator) -> None:
    """Empty groups, one row, tiles that are begun; sizes that are cut by the plan; rows past the sum are +0."""
    n, k = (int(side) for side in rng.choice(COLUMNS, 2))
    check(make_problem(rng, case, SIZES[sizes], n, k, tail=int(rng.choice([0, 1, 140]))))


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_every_size_up_to_a_tile(case: Case, rng: np.random.Generator) -> None:
    """Groups of 0 to 130 rows in one call, in random order."""
    sizes = tuple(int(size) for size in rng.permutation(131))
    check(make_problem(rng, case, sizes, 33, 40, tail=1))


@pytest.mark.parametrize("case", SAMPLES, ids=str)
@pytest.mark.parametrize("n", [1, 17, 128, 272])
@pytest.mark.parametrize("k", [1, 17, 129, 272, 513])
def test_every_side(case: Case, n: int, k: int, rng: np.random.Generator) -> None:
    """K and N of any size, one included: no multiple of a block, a panel or a vector is asked for."""
    check(make_problem(rng, case, (20, 7), n, k))


def test_long_sums(rng: np.random.Generator) -> None:
    """Sums over several thousand products keep fp32's error, over columns as over rows."""
    check(make_problem(rng, Case(gemm="fprop", out_dtype="float32"), (40,), 40, 4096))
    check(make_problem(rng, Case(gemm="wgrad", out_dtype="float32"), (4096,), 40, 40))


@pytest.mark.parametrize("bias", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias_scales", [False, True])
def test_bias(bias: str, bias_scales: bool, rng: np.random.Generator) -> None:
    """The bias of the row's group, times the row's factor; rows past the sum stay +0. dgrad makes y of [G, K, N]."""
    for case in (
        Case(gemm="fprop"),
        Case(gemm="fprop", scaling="mxfp8", out_dtype="float32"),
        Case(gemm="dgrad", scaling="row"),
    ):
        check(make_problem(rng, case, (0, 130, 9), 270, 50, tail=4, bias=bias, bias_scales=bias_scales))


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Small ones, whose products and sums fp32 holds."""
    return rng.integers(-8, 9, shape).astype(np.float32).astype(DTYPE[dtype])


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_one_rounding(out_dtype: str, accumulate: bool, rng: np.random.Generator) -> None:
    """Sums that fp32 holds come out as the nearest value: the bias and the accumulator are added before it."""
    sizes, n, k = (70, 0, 33), 50, 300
    x, dy, w = (integers(rng, shape, "bfloat16") for shape in ((103, k), (103, n), (3, n, k)))
    if accumulate:
        case = Case(gemm="wgrad", out_dtype=out_dtype, accumulate=True)
        problem = make_problem(rng, case, sizes, n, k, left=dy, right=x)
        problem.accumulator = integers(rng, (3, n, k), out_dtype) * DTYPE[out_dtype].type(0.5)
    else:
        problem = make_problem(rng, Case(gemm="fprop", out_dtype=out_dtype), sizes, n, k, left=x, right=w)
        problem.bias = integers(rng, (3, n), "float32") * np.float32(0.5)
        problem.bias_scales = integers(rng, (103,), "float32")
    out = run(problem)
    for group, (rows, a, b) in enumerate(zip(problem.spans(), problem.left.values, problem.right.values, strict=True)):
        p, q = problem.added(group) or (None, None)
        assert p is not None
        exact = a.astype(np.float64) @ b.astype(np.float64).T + p @ q.T
        actual = out[group] if accumulate else out[rows]
        assert (actual == exact.astype(np.float32).astype(DTYPE[out_dtype])).all()


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", [case for case in SAMPLES if case.gemm == "wgrad"], ids=str)
def test_accumulate(case: Case, out_dtype: str, rng: np.random.Generator) -> None:
    """The gradient is added to what `out` holds; groups without rows keep their bits, those of a NaN too."""
    case = replace(case, accumulate=True, out_dtype=out_dtype)
    problem = make_problem(rng, case, (0, 150, 0, 16, 1), 70, 140, tail=3)
    assert problem.accumulator is not None
    bits = problem.accumulator.view(np.uint32 if out_dtype == "float32" else np.uint16)
    bits[0, 0, :3] = {"float32": 0xFFA12345, "float16": 0xFD23, "bfloat16": 0xFFA3}[out_dtype]
    bits[2, 0, 0] = 1 << (31 if out_dtype == "float32" else 15)  # -0
    check(problem, out_group_stride=70 * 150 + 9, out_row_stride=150)


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_strides_of_the_result(case: Case, rng: np.random.Generator) -> None:
    """Rows and matrices of the result may stand apart; nothing between them is written."""
    n, k = 33, 70
    cols = n if case.gemm == "fprop" else k
    more = {"out_group_stride": n * (cols + 3) + 7} if case.gemm == "wgrad" else {}
    check(make_problem(rng, case, (40, 0, 5), n, k, tail=6), out_row_stride=cols + 3, **more)


@pytest.mark.parametrize("case", unquantized_cases(), ids=str)
def test_strides_of_the_operands(case: Case, rng: np.random.Generator) -> None:
    """Rows of x, dy and w may stand apart, as views of wider arrays do."""
    check(make_problem(rng, case, (40, 0, 135), 33, 70, tail=6, left_stride=75, right_stride=81))


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_threads_change_no_bit(case: Case, rng: np.random.Generator) -> None:
    """Any number of threads, and the loops that every processor runs (threads 0), give the same bits."""
    problem = make_problem(rng, case, (300, 0, 17, 130), 300, 520, tail=9)
    first = check(problem)
    for threads in (0, 2, 3, 7, 64):
        assert same_bits(run(problem, threads=threads), first), f"{threads} threads differ from 1"


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("case", [*SAMPLES, *unquantized_cases(("float32",))], ids=str)
def test_infinities_and_nan(case: Case, threads: int, rng: np.random.Generator) -> None:
    """Infinities and NaN of an operand reach the results that they enter, and no other one."""
    sizes, n, k = (131, 0, 20), 40, 150
    shapes = {"x": (151, k), "w": (3, n, k), "dy": (151, n)}
    roles = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}[case.gemm]
    operands = [random_values(rng, shapes[role], case.dtype) for role in roles]
    for values, value in zip(operands, rng.permutation([np.inf, -np.inf, np.nan]), strict=False):
        flat = values.reshape(-1)
        flat[rng.integers(flat.size, size=3)] = value
        flat[rng.integers(flat.size, size=20)] = 0  # times an infinity: NaN
    problem = make_problem(rng, case, sizes, n, k, left=operands[0], right=operands[1], tail=0)
    check(problem, threads=threads, zero_mean=False)


def test_subnormal_products(rng: np.random.Generator) -> None:
    """Products below the normal range are kept."""
    x = random_values(rng, (20, 40), "float32") * np.float32(2.0**-100)
    w = random_values(rng, (1, 30, 40), "float32") * np.float32(2.0**-35)
    case = Case(gemm="fprop", dtype="float32", out_dtype="float32")
    out = run(make_problem(rng, case, (20,), 30, 40, left=x, right=w))
    exact = x.astype(np.float64) @ w[0].astype(np.float64).T
    assert np.abs(out - exact).max() <= 40 * 2.0**-149
    assert np.abs(out).max() > 2.0**-140


@pytest.mark.parametrize("case", [*SAMPLES, *(replace(SAMPLES[2], accumulate=True),)], ids=str)
def test_no_rows_at_all(case: Case, rng: np.random.Generator) -> None:
    """M = 0: nothing is read, weight gradients are +0 or stay as they are."""
    check(make_problem(rng, case, (0, 0), 5, 20))
