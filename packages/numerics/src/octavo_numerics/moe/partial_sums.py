"""Sums of a token's rows where its experts are on several ranks and each returns one partial sum."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_FP32 = 2.0**-24


def partial_sums_bound(rows: NDArray[Any], ranks: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """What partial sums may be off by: |y - sum of rows|, for each element of y [T, N].

    rows    [T, k, N], the row of each choice, in the dtype of y
    ranks   [T, k], the rank of each choice's expert; negative for a choice that goes nowhere

    A rank sums its rows of a token in fp32 and rounds once to the dtype; the token's own rank sums what it receives in
    the same way. Let u be half a unit of the dtype, and g = k 2^-24 the relative error of fp32 sums of k terms at most
    (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). Then a rank's sum s, of rows whose absolute
    values sum to a, is off by e = g a + u (|s| + g a), and y by f + u (|sum| + f), where f is the sum over the ranks of
    e + g (|s| + e).
    """
    wide = np.where((ranks >= 0)[:, :, None], rows.astype(np.float64), 0.0)
    info = ml_dtypes.finfo(rows.dtype)  # type: ignore[no-untyped-call]
    unit, smallest = float(info.eps) / 2, float(info.smallest_subnormal)
    grows = rows.shape[1] * _FP32 / (1 - rows.shape[1] * _FP32)
    off = np.zeros((rows.shape[0], rows.shape[2]))
    for rank in np.unique(ranks[ranks >= 0]):
        here = np.where((ranks == rank)[:, :, None], wide, 0.0)
        total, magnitude = np.abs(here.sum(1)), np.abs(here).sum(1)
        error = grows * magnitude + unit * (total + grows * magnitude) + smallest / 2
        off += error + grows * (total + error)
    bound: NDArray[np.float64] = off + unit * (np.abs(wide.sum(1)) + off) + smallest / 2
    return bound
