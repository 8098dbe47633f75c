"""T2: the norms of the error over the whole result, its rows, its columns and its tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from octavo_numerics.gemm.elements import F64, ratio

_TILE = 8


@dataclass(frozen=True, slots=True)
class Norm:
    """T2 for one way of cutting the result.

    k       allows for chance
    least   elements that a cut needs to be judged
    but_the_largest   whether the largest error of each cut is left to T1
    """

    k: float
    least: int
    but_the_largest: bool = False


NORMS: dict[str, Norm] = {
    "whole": Norm(1.2, 1024),
    "row": Norm(1.4, 256),
    "column": Norm(2.0, 64),
    "tile": Norm(2.0, _TILE * _TILE, but_the_largest=True),
}


def norm_ratios(
    error: F64, expected: F64, folded: F64, *, floor: float, spread: float, k: int
) -> tuple[dict[str, float], tuple[int, int] | None]:
    """T2's largest ratio for each way of cutting the result, and the first element of the worst cut that fails.

    error, expected, folded   [R, C] squares of the errors, of the values, and of what folding may add
    floor    what underflow may add to the error of each element
    spread   the ||e|| / ||C|| that is expected, of which chance may make a norm's `k` times as much
    k        products per sum
    """
    rows, cols = error.shape
    cuts: dict[str, tuple[int, int]] = {
        "whole": (rows, cols),
        "row": (1, cols),
        "column": (rows, 1),
        "tile": (_TILE, _TILE),
    }
    t2: dict[str, float] = {}
    worst: tuple[float, tuple[int, int]] | None = None
    for name, (height, width) in cuts.items():
        norm = NORMS[name]
        if height * width < norm.least or height > rows or width > cols or (name == "tile" and k < _TILE):
            continue
        limit = norm.k * spread
        for top in {0, rows % height}:
            for left in {0, cols % width}:
                e = np.sqrt(_cut_sums(error, height, width, top, left, but_the_largest=norm.but_the_largest))
                c = np.sqrt(_cut_sums(expected, height, width, top, left))
                f = np.sqrt(_cut_sums(folded, height, width, top, left))
                ratios = ratio(e, limit * c + (1 + limit) * f + floor * math.sqrt(height * width))
                largest = float(ratios.max())
                t2[name] = max(t2.get(name, 0.0), largest)
                if largest > 1 and (worst is None or largest > worst[0]):
                    i, j = np.unravel_index(int(ratios.argmax()), ratios.shape)
                    worst = largest, (top + int(i) * height, left + int(j) * width)
    return t2, None if worst is None else worst[1]


def _cut_sums(values: F64, height: int, width: int, top: int, left: int, *, but_the_largest: bool = False) -> F64:
    """Sums over the [height, width] cuts that fit below `top` and right of `left`.

    but_the_largest   each sum leaves out the largest value of its cut
    """
    values = values[top:, left:]
    down, across = values.shape[0] // height, values.shape[1] // width
    cuts = values[: down * height, : across * width].reshape(down, height, across, width)
    sums: F64 = cuts.sum(axis=(1, 3))
    return np.maximum(sums - cuts.max(axis=(1, 3)), 0.0) if but_the_largest else sums
