"""The three grouped GEMMs in float64: what every backend's results are compared with.

Operands are what the GEMM really multiplies: dequantized values, or the high-precision tensors themselves. Rows past
the sum are not read, and their results are exact zeros; so is the weight gradient of a group without rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo_numerics.checks import check_sizes

F64 = npt.NDArray[np.float64]


def _operand(array: Any, name: str, rank: int) -> npt.NDArray[Any]:
    values = np.asarray(array)
    if values.ndim != rank:
        shape = "[M, C]" if rank == 2 else "[G, N, K]"
        raise ValueError(f"{name} has shape {list(values.shape)}; give {shape}")
    return values


def _fits(left: str, left_size: int, right: str, right_size: int) -> None:
    if left_size != right_size:
        raise ValueError(f"{left} is {left_size} and {right} is {right_size}; they must be equal")


def _spans(group_sizes: Any, rows: int, groups: int | None = None) -> list[slice]:
    """The rows of each group."""
    sizes = check_sizes(group_sizes, rows)
    if groups is not None:
        _fits("the number of group_sizes", len(sizes), "the number of matrices in w", groups)
    ends = np.cumsum(sizes)
    return [slice(int(end - size), int(end)) for end, size in zip(ends, sizes, strict=True)]


@np.errstate(all="ignore")
def grouped_matmul(x: Any, w: Any, group_sizes: Any) -> F64:
    """y[r] = x[r] @ w[g].T for each row r of group g: x [M, K], w [G, N, K], y [M, N] float64 (fprop)."""
    x, w = _operand(x, "x", 2), _operand(w, "w", 3)
    _fits("x's last axis", x.shape[1], "w's last axis", w.shape[2])
    y = np.zeros((x.shape[0], w.shape[1]))
    for group, rows in enumerate(_spans(group_sizes, x.shape[0], w.shape[0])):
        y[rows] = x[rows].astype(np.float64) @ w[group].astype(np.float64).T
    return y


@np.errstate(all="ignore")
def grouped_dgrad(dy: Any, w: Any, group_sizes: Any) -> F64:
    """dx[r] = dy[r] @ w[g] for each row r of group g: dy [M, N], w [G, N, K], dx [M, K] float64."""
    dy, w = _operand(dy, "dy", 2), _operand(w, "w", 3)
    _fits("dy's last axis", dy.shape[1], "w's middle axis", w.shape[1])
    dx = np.zeros((dy.shape[0], w.shape[2]))
    for group, rows in enumerate(_spans(group_sizes, dy.shape[0], w.shape[0])):
        dx[rows] = dy[rows].astype(np.float64) @ w[group].astype(np.float64)
    return dx


@np.errstate(all="ignore")
def grouped_wgrad(dy: Any, x: Any, group_sizes: Any) -> F64:
    """dw[g] = dy[rows of g].T @ x[rows of g]: dy [M, N], x [M, K], dw [G, N, K] float64.

    Hadamard operands come in their padded shape with the padded sizes (`plane_sizes`); both are in the Hadamard
    domain, so the product is the gradient itself.
    """
    dy, x = _operand(dy, "dy", 2), _operand(x, "x", 2)
    _fits("dy's rows", dy.shape[0], "x's rows", x.shape[0])
    spans = _spans(group_sizes, dy.shape[0])
    dw = np.zeros((len(spans), dy.shape[1], x.shape[1]))
    for group, rows in enumerate(spans):
        dw[group] = dy[rows].astype(np.float64).T @ x[rows].astype(np.float64)
    return dw
