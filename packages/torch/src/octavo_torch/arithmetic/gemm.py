"""Grouped GEMMs on unquantized or dequantized operands: fprop, dgrad, wgrad.

On a CPU: a loop over host sizes, fp32 products, or fp64 ones where the process has allowed fp32 ones to be computed in
less. Elsewhere: a loop over a static bound of row panels whose group is
looked up on the device, fp64 products, because fp32 ones are TF32 wherever the process has allowed that and only a
global flag could forbid it. Either way sums are rounded once to the result's dtype, rows past the sum are not read
and come back as +0, and the order of summation is fixed. `sizes` are int64 [G] on the operands' device, not negative,
and sum to at most the rows. Operands are made contiguous first, and on a CPU they and rows of results begin at whole
vectors: a BLAS sums transposed ones, and few rows that begin elsewhere, in another order, and the same values shall
give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo_torch.arithmetic.groups import RowGroups
from octavo_torch.arithmetic.processor import multiplies_in_fp32

_PANEL = 256
_ALIGNMENT = 64  # bytes, at which torch's own memory on a CPU begins


def fprop(
    x: Tensor, w: Tensor, sizes: Tensor, bias: Tensor | None, bias_scales: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """y[r] = x[r] @ w[g].T + s[r] * bias[g]: x [M, K], w [G, N, K], bias [G, N], bias_scales s [M] (1 by default)."""
    return _rows_times_matrices(x, w, True, sizes, bias, bias_scales, dtype)


def dgrad(dy: Tensor, w: Tensor, sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """dx[r] = dy[r] @ w[g]: dy [M, N], w [G, N, K]."""
    return _rows_times_matrices(dy, w, False, sizes, None, None, dtype)


def wgrad(x: Tensor, dy: Tensor, sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """dw[g] = dy_g.T @ x_g: x [M, K], dy [M, N]; exactly zero for a group without rows."""
    shape = (sizes.shape[0], dy.shape[1], x.shape[1])
    if x.device.type == "cpu":
        product = _product_dtype()
        dw = torch.zeros(shape, dtype=product, device=x.device)
        for group, rows in _host_rows(sizes):
            torch.mm(_as(product, dy[rows]).t(), _as(product, x[rows]), out=dw[group])
        return dw.to(dtype)
    dw = torch.zeros(shape, dtype=torch.float64, device=x.device)
    for panel in _panels(sizes, x.shape[0]):
        dw.index_add_(0, panel.group, (panel.take(dy).t() @ panel.take(x))[None])
    return dw.to(dtype)


def _rows_times_matrices(
    x: Tensor,
    w: Tensor,
    transposed: bool,
    sizes: Tensor,
    bias: Tensor | None,
    bias_scales: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[M, A] rows times their group's [A, B] matrix, which is stored as [B, A] where `transposed`."""
    shape = (x.shape[0], w.shape[1] if transposed else w.shape[2])
    if x.device.type == "cpu":
        product = _product_dtype()
        y = torch.zeros(shape, dtype=product, device=x.device)
        for group, rows in _host_rows(sizes):
            matrix = _as(product, w[group])
            y[rows] = torch.mm(_as(product, x[rows]), matrix.t() if transposed else matrix)
            if bias is not None:
                scales = None if bias_scales is None else bias_scales[rows].to(product)
                y[rows] += _scaled_bias(bias[group].to(product), scales)
        return y.to(dtype)
    y = torch.zeros((shape[0] + 1, shape[1]), dtype=torch.float64, device=x.device)
    for panel in _panels(sizes, x.shape[0]):
        matrix = w.index_select(0, panel.group)[0].double()
        value = panel.take(x) @ (matrix.t() if transposed else matrix)
        if bias is not None:
            scales = None if bias_scales is None else panel.take(bias_scales[:, None])[:, 0]
            value += _scaled_bias(bias.index_select(0, panel.group)[0].double(), scales)
        # rows that are not the panel's own go to a spare last row
        y.index_copy_(0, torch.where(panel.real, panel.rows, shape[0]), value)
    return y[:-1].to(dtype)


def _product_dtype() -> torch.dtype:
    """Of products on a CPU."""
    return torch.float32 if multiplies_in_fp32() else torch.float64


def _as(dtype: torch.dtype, value: Tensor) -> Tensor:
    value = value.contiguous().to(dtype)
    return value if value.data_ptr() % _ALIGNMENT == 0 else value.clone()


def _scaled_bias(bias: Tensor, scales: Tensor | None) -> Tensor:
    """bias [N], or its outer product with the rows' scales."""
    return bias if scales is None else scales[:, None] * bias


def _host_rows(sizes: Tensor) -> Iterator[tuple[int, slice]]:
    """The rows of each group that has some."""
    start = 0
    for group, size in enumerate(sizes.tolist()):
        if size:
            yield group, slice(start, start + size)
        start += size


class _Panel:
    """At most _PANEL rows of one group, known on the device only: rows [p], real [p], group [1]."""

    def __init__(self, rows: Tensor, real: Tensor, group: Tensor) -> None:
        self.rows, self.real, self.group = rows, real, group

    def take(self, source: Tensor) -> Tensor:
        """fp64 rows of `source`, zero where they are not the panel's."""
        return source.index_select(0, self.rows).double().masked_fill_(~self.real[:, None], 0.0)


def _panels(sizes: Tensor, rows: int) -> Iterator[_Panel]:
    if not rows:
        return
    groups = RowGroups(sizes, rows)
    index, real, group = groups.panels(min(_PANEL, rows))
    safe = group.clamp(max=groups.count - 1)
    for panel in range(index.shape[0]):
        yield _Panel(index[panel], real[panel], safe[panel : panel + 1])
