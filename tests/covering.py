"""A selection of a product of options in which every two options of different axes meet."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = tuple[Any, ...]


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Cases, an option per axis, that hold every pair of options; the same ones at each call.

    Each case begins with a pair that none before it holds, and is the best of many ways to fill up the rest.
    """
    choose = random.Random(0)
    options = [list(values) for values in axes.values()]
    missing = {
        (a, i, b, j)
        for a, b in combinations(range(len(options)), 2)
        for i, j in product(range(len(options[a])), range(len(options[b])))
    }
    made: list[tuple[int, ...]] = []
    while missing:
        a, i, b, j = min(missing)
        best: tuple[int, ...] = ()
        for _ in range(60):
            filled = [choose.randrange(len(values)) for values in options]
            filled[a], filled[b] = i, j
            best = max(best, tuple(filled), key=lambda case: len(pairs(case) & missing))
        made.append(best)
        missing -= pairs(best)
    return [tuple(values[index] for values, index in zip(options, case, strict=True)) for case in made]


def pairs(case: Sequence[int]) -> set[tuple[int, int, int, int]]:
    """Every two options of a case, by axis and number."""
    return {(a, case[a], b, case[b]) for a, b in combinations(range(len(case)), 2)}
