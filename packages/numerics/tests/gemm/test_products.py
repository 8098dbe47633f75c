"""The float64 oracle: plain sums, group by group."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo import NVFP4
from octavo_numerics import dequantize, grouped_dgrad, grouped_matmul, grouped_wgrad, plane_sizes, quantize

SIZES = [3, 0, 5, 1]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_each_result_is_its_definition(dtype: Any, rng: np.random.Generator) -> None:
    """y, dx and dw as sums written out; NaN tails are not read and come back as zeros (faults.md 8, 9, 12)."""
    x, dy, w = (rng.standard_normal(shape).astype(dtype) for shape in ((11, 4), (11, 6), (4, 6, 4)))
    x[9:], dy[9:] = np.nan, np.nan
    wide_x, wide_dy, wide_w = (array.astype(np.float64) for array in (x, dy, w))
    groups = np.repeat(np.arange(4), SIZES)
    y, dx, dw = grouped_matmul(x, w, SIZES), grouped_dgrad(dy, w, SIZES), grouped_wgrad(dy, x, SIZES)
    assert y.dtype == dx.dtype == dw.dtype == np.float64
    for row, group in enumerate(groups):
        # float64 against float64, a few dozen terms in another order: far above their rounding, far below a fault
        np.testing.assert_allclose(y[row], wide_w[group] @ wide_x[row], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(dx[row], wide_dy[row] @ wide_w[group], rtol=1e-12, atol=1e-12)
    for group in np.arange(4):
        outer = [np.outer(wide_dy[row], wide_x[row]) for row in np.flatnonzero(groups == group)]
        np.testing.assert_allclose(dw[group], sum(outer, np.zeros((6, 4))), rtol=1e-12, atol=1e-12)
    for tail in (y[9:], dx[9:], dw[1]):
        assert not tail.any()
        assert not np.signbit(tail).any()


def test_wgrad_of_hadamard_operands_is_the_gradient(rng: np.random.Generator) -> None:
    """Column data of X and dY, padded and in the Hadamard domain, multiply to dY^T X (numerics.md: 17 % at most)."""
    recipe = NVFP4(stochastic_gradients=False)
    x, dy = (rng.standard_normal((200, 64)).astype(np.float32) for _ in range(2))
    sizes = [90, 0, 101]
    x_spec, dy_spec = recipe.quantizer("x"), recipe.quantizer("dy")
    assert x_spec is not None
    assert dy_spec is not None
    qx, qdy = quantize(x, x_spec, sizes), quantize(dy, dy_spec, sizes)
    padded = plane_sizes(qx, "columnwise")
    dw = grouped_wgrad(dequantize(qdy, "columnwise"), dequantize(qx, "columnwise"), padded)
    expected = grouped_wgrad(dy, x, sizes)
    assert np.linalg.norm(dw - expected) / np.linalg.norm(expected) < 0.18
    assert not dw[1].any()


def test_non_finite_values_stay_in_their_rows() -> None:
    """A NaN or an infinity reaches its own results and warns nobody."""
    x, w = np.ones((3, 2)), np.ones((1, 2, 2))
    x[1, 0] = np.inf
    w[0, 1, 0] = 0
    y = grouped_matmul(x, w, [3])
    assert y[[0, 2]].tolist() == [[2, 1], [2, 1]]
    assert y[1, 0] == np.inf
    assert np.isnan(y[1, 1])
