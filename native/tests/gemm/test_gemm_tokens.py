"""GEMMs that read rows where tokens stand: every byte is that of the rows themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_calls import DTYPE, make_plan
from guarded import Guarded, put

from octavo_native import gemms

G, N, K = 5, 24, 40
SIDES = {"fprop": ("left",), "dgrad": ("left",), "wgrad": ("left", "right")}
"""The ragged operands of each GEMM."""


def shapes(gemm: str, rows: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Of the left operand, the right one, and the result."""
    if gemm == "wgrad":
        return (rows, N), (rows, K), (G, N, K)
    left, out = (K, N) if gemm == "fprop" else (N, K)
    return (rows, left), (G, N, K), (rows, out)


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize(("gemm", "accumulate"), [*((gemm, False) for gemm in SIDES), ("wgrad", True)])
def test_products_of_tokens_have_the_bits_of_rows(
    gemm: str, dtype: str, accumulate: bool, rng: np.random.Generator
) -> None:
    """Tokens with a gap between their rows, some of nobody's choices, and numbers that are no choice, whose rows are
    zeros; tokens that nobody chose are NaN, which nobody reads."""
    each, count = int(rng.integers(1, 4)), 37
    sizes = rng.multinomial(count * each - 9, (0.3, 0.0, 0.4, 0.05, 0.25))
    rows = int(sizes.sum()) + 6
    order = rng.permutation(count * each)[:rows]
    order[rng.integers(0, rows, 5)] = rng.choice([-1, count * each, 1 << 40, -(1 << 62)], 5)
    inside = (order >= 0) & (order < count * each)
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
