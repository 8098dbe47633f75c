"""GEMMs that read rows where tokens stand: every byte is that of the rows themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_calls import DTYPE, make_plan
from guarded import Guarded, put

from octavo_native import gemms

G, N, K = 5, 24, 40
WIDE = 272
"""Columns of two blocks and a part of one."""
SIDES = {"fprop": ("left",), "dgrad": ("left",), "wgrad": ("left", "right")}
"""The ragged operands of each GEMM."""


def shapes(gemm: str, rows: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Of the left operand, the right one, and the result."""
    if gemm == "wgrad":
        return (rows, N), (rows, K), (G, N, K)
    left, out = (K, N) if gemm == "fprop" else (N, K)
    return (rows, left), (G, N, K), (rows, out)


def draw_rows(rng: np.random.Generator, choices: int) -> tuple[Any, Any, Any]:
    """Group sizes, the choice of each row, past the sum too, and whether it is one: a few numbers are not."""
    sizes = rng.multinomial(choices - 9, (0.3, 0.0, 0.4, 0.05, 0.25))
    order = rng.permutation(choices)[: sizes.sum() + 6]
    order[rng.integers(0, len(order), 5)] = rng.choice([-1, choices, 1 << 40, -(1 << 62)], 5)
    return sizes, order, (order >= 0) & (order < choices)


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize(("gemm", "accumulate"), [*((gemm, False) for gemm in SIDES), ("wgrad", True)])
def test_products_of_tokens_have_the_bits_of_rows(
    gemm: str, dtype: str, accumulate: bool, rng: np.random.Generator
) -> None:
    """Tokens with a gap between their rows, some of nobody's choices, and numbers that are no choice, whose rows are
    zeros; tokens that nobody chose are NaN, which nobody reads."""
    each, count = int(rng.integers(1, 4)), 37
    sizes, order, inside = draw_rows(rng, count * each)
    rows = len(order)
    plan, _ = make_plan(sizes, rows)
    kind = gemms.gemm_named(gemm=gemm, dtype=dtype, out_dtype=dtype, accumulate=accumulate)
    *operands, out_shape = shapes(gemm, rows)
    given = [rng.standard_normal(shape).astype(DTYPE[dtype]) for shape in operands]
    before = rng.standard_normal(out_shape).astype(DTYPE[dtype])
    for side in SIDES[gemm]:
        number = ("left", "right").index(side)
        width, gap = operands[number][1], int(rng.integers(0, 4))
        tokens = np.full((count, width + gap), np.nan, DTYPE[dtype])
        chosen = np.unique(order[inside] // each)
        tokens[chosen, :width] = rng.standard_normal((chosen.size, width)).astype(DTYPE[dtype])
        moved = list(given)
        moved[number] = np.where(inside[:, None], tokens[np.clip(order, 0, count * each - 1) // each, :width], 0)
        through = list(given)
        through[number] = tokens

        def run(arrays: list[Any], **index: int) -> Any:
            held = [put(np.ascontiguousarray(array)) for array in arrays]
            out = Guarded(out_shape, DTYPE[dtype])
            out.array[:] = before
            kind.run(
                cuda=False, rows=rows, n=N, k=K, groups=G, plan=plan.address, left=held[0].address,
                right=held[1].address, out=out.address, threads=3, **index,
            )  # fmt: skip
            return out.bytes.copy()

        indices = put(order)
        how: dict[str, int] = {f"{side}_index": indices.address, f"{side}_stride": width + gap}
        made = run(through, **how, each=each, count=count)
        assert (made == run(moved)).all(), (side, each, sizes)


@pytest.mark.parametrize("left_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad"])
def test_products_of_codes_of_tokens_have_the_bits_of_rows(
    gemm: str, left_format: str, rng: np.random.Generator
) -> None:
    """In block scaling a row has the codes and scales of its token, which are read where the token's stand: the same
    with choices that are nobody's, and with NaN in tokens that nobody chose."""
    each, count = int(rng.integers(1, 4)), 37
    sizes, order, inside = draw_rows(rng, count * each)
    rows = len(order)
    token = np.where(inside, order // each, 0)
    plan, _ = make_plan(sizes, rows)
    n, k = (N, WIDE) if gemm == "fprop" else (WIDE, K)
    kind = gemms.gemm_named(gemm=gemm, scaling="block", left_format=left_format, right_square=True, out_dtype="float32")
    codes = rng.integers(0, 0x78, (count, WIDE), dtype=np.uint8)  # finite in both formats
    blocks = -(-WIDE // 128)
    scales = np.exp2(rng.integers(-6, 7, (count, blocks))).astype(np.float32)
    nobody = np.setdiff1d(np.arange(count), token[inside])
    codes[nobody], scales[nobody] = 0x7F, np.nan
    moved = np.where(inside[:, None], codes[token], 0)
    scales_of_rows = np.ones((blocks, 4 * -(-rows // 4)), np.float32)
    scales_of_rows[:, :rows] = np.where(inside, scales[token].T, 1)
    weights = put(rng.integers(0, 0x78, G * 1024 * WIDE, dtype=np.uint8))
    factors = put(np.exp2(rng.integers(-6, 7, 4096)).astype(np.float32))

    def run(left: Any, left_scales: Any, **index: int) -> Any:
        held = [put(np.ascontiguousarray(array)) for array in (left, left_scales)]
        out = Guarded((rows, n if gemm == "fprop" else k), np.float32)
        kind.run(
            cuda=False, rows=rows, n=n, k=k, groups=G, plan=plan.address, left=held[0].address,
            left_scales=held[1].address, right=weights.address, right_scales=factors.address, out=out.address,
            threads=3, **index,
        )  # fmt: skip
        return out.bytes.copy()

    indices = put(order)
    made = run(codes, scales, left_index=indices.address, each=each, count=count)
    assert (made == run(moved, scales_of_rows)).all(), (each, sizes)
