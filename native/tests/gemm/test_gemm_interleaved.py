"""wgrad whose rows or columns take turns in memory: the bits of the halves, in their places.

docs/decisions/0068. What is added to is in turns, too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cpu_gemms import run
from devices import needs_device
from gemm_problems import Array, Case, Problem, make_problem

CASES = (
    *(Case(gemm="wgrad", scaling=scaling) for scaling in ("delayed", "current", "row", "block", "mxfp8")),
    Case(gemm="wgrad", scaling="block", left_square=True),
    Case(gemm="wgrad", scaling="block", right_square=True),
    Case(gemm="wgrad", scaling="nvfp4", left_format="e2m1", right_format="e2m1", hadamard=True),
)
"""Each way in which scales are read."""

SIZES = (130, 0, 17, 300, 1)
SIDES = ("left_interleave", "right_interleave")
BOTH = [
    pytest.param(case, side, id=f"{case}-{side}")
    for case in CASES
    for side in SIDES
    if not getattr(case, side.replace("interleave", "square"))
]
"""x alone has square blocks, and the halves are dy's."""


def in_turns(halves: Array, side: str, block: int) -> Array:
    """dw [G, N, K] with its rows, or its columns, in blocks that take turns."""
    groups, n, k = halves.shape
    if side == "left_interleave":
        return halves.reshape(groups, 2, -1, block, k).swapaxes(1, 2).reshape(halves.shape)
    return halves.reshape(groups, n, 2, -1, block).swapaxes(2, 3).reshape(halves.shape)


def turned(problem: Problem, side: str, block: int) -> Problem:
    """The same problem, of which dw is written and added to in turns."""
    more = None if problem.accumulator is None else in_turns(problem.accumulator, side, block)
    return replace(problem, case=replace(problem.case, **{side: block}), accumulator=more)


def same(ours: Array, theirs: Array) -> bool:
    """NaN and the sign of zero included."""
    return bool((ours.view(np.uint8) == np.ascontiguousarray(theirs).view(np.uint8)).all())


def problems(rng: np.random.Generator, case: Case, multiple: int) -> list[tuple[Problem, int]]:
    """Sides that end within a tile and past one, each with blocks that divide them."""
    made = []
    for n, k, block in ((48, 176, 1), (176, 304, 8), (272, 48, 2), (640, 528, 8)):
        for accumulate, out_dtype in ((False, "bfloat16"), (True, "float32"), (True, "bfloat16")):
            used = replace(case, accumulate=accumulate, out_dtype=out_dtype)
            made.append((make_problem(rng, used, SIZES, n + multiple, k + multiple, tail=9), block))
    return made


@pytest.mark.parametrize(("case", "side"), BOTH)
def test_cpu_turns_are_the_halves(case: Case, side: str, rng: np.random.Generator) -> None:
    """Every scaling, dtypes of the result, and sums that are added to it."""
    for problem, block in problems(rng, case, 0)[:6]:
        ours = run(turned(problem, side, block), threads=2)
        assert same(ours, in_turns(run(problem), side, block)), (problem.sides, block)


@pytest.mark.parametrize(
    ("case", "changes", "sentence"),
    [
        (CASES[0], {"left_interleave": 1, "right_interleave": 1}, "give one of them"),
        (CASES[0], {"left_interleave": -2}, "give one of them"),
        (CASES[0], {"left_interleave": 7}, "give a divisor of half"),
        (Case(gemm="fprop", scaling="block"), {"left_interleave": 1}, "wgrad of quantized operands"),
        (Case(gemm="wgrad"), {"left_interleave": 1}, "wgrad of quantized operands"),
        (Case(gemm="wgrad", scaling="block", left_square=True), {"left_interleave": 1}, "the other side's"),
        (Case(gemm="wgrad", scaling="block", right_square=True), {"right_interleave": 1}, "the other side's"),
    ],
    ids=str,
)
def test_what_takes_no_turns_is_refused(case: Case, changes: dict[str, int], sentence: str) -> None:
    """Both sides at once, blocks that do not divide a half, other GEMMs, operands that are not quantized, and x in
    square blocks on the side of the halves."""
    gemm = replace(case, **changes).native
    with pytest.raises(ValueError, match=sentence):
        gemm.workspace_bytes(cuda=False, rows=16, n=32, k=32, groups=1)


def test_cuda_takes_blocks_that_divide_32() -> None:
    """A tile holds whole blocks of both halves, on the smallest tile, too."""
    gemm = replace(CASES[0], left_interleave=64).native
    with pytest.raises(ValueError, match="does not divide 32"):
        gemm.workspace_bytes(cuda=True, rows=16, n=128, k=128, groups=1)


@needs_device
@pytest.mark.parametrize(("case", "side"), BOTH)
def test_cuda_turns_are_the_halves_on_every_tile(case: Case, side: str, rng: np.random.Generator) -> None:
    """Operands are read in turns by TMA, scales through a copy: products, scales and places belong to each other."""
    pytest.importorskip("torch", reason="torch holds the memory of the device")
    from device_gemms import Prepared
    from problems import CUDA

    for problem, block in problems(rng, case, 0):
        halves, turns = Prepared(problem, CUDA), Prepared(turned(problem, side, block), CUDA)
        for tile in (-1, *range(len(halves.gemm.tiles()))):
            ours, theirs = turns.result(tile), in_turns(halves.result(tile), side, block)
            assert same(ours, theirs), (problem.sides, block, tile)
