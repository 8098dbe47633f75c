"""The three grouped GEMMs: dequantize one group's tiles, multiply in fp32, round once to the result's dtype.

`fprop`, `dgrad` and `wgrad` are what Octavo calls; the loops behind them are custom ops, as in `quantize`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from octavo_torch.plugin_api import GroupedTensor
from torch import Tensor
from torch.library import custom_op

from acme_octavo.groups import host_sizes, spans
from acme_octavo.tiles import dequantize_matrix, kind_of, one_scale_row_a_group, rows_of_tiles, tile_shape


def fprop(
    out_dtype: torch.dtype,
    x: GroupedTensor,
    w: GroupedTensor,
    group_sizes: Tensor,
    *,
    bias: Tensor | None = None,
    bias_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y[r] = x[r] @ w[g].T + bias[g] (times bias_scales[r] where given); rows past the sum are zero."""
    y: Tensor = rows_times_weights(
        *_plane(x, "rowwise"), *_plane(w, "rowwise"), group_sizes, bias, bias_scales, True, out_dtype
    )
    return y if out is None else out.copy_(y)


def dgrad(
    out_dtype: torch.dtype, dy: GroupedTensor, w: GroupedTensor, group_sizes: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """dx[r] = dy[r] @ w[g]; rows past the sum are zero."""
    dx: Tensor = rows_times_weights(
        *_plane(dy, "rowwise"), *_plane(w, "columnwise"), group_sizes, None, None, False, out_dtype
    )
    return dx if out is None else out.copy_(dx)


def wgrad(
    out_dtype: torch.dtype,
    x: GroupedTensor,
    dy: GroupedTensor,
    group_sizes: Tensor,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """dw[g] = dy_g.T @ x_g, added to `out` or written over it; a group without rows adds nothing or is zero."""
    dw: Tensor = columns_times_columns(*_plane(dy, "columnwise"), *_plane(x, "columnwise"), group_sizes)
    if out is None:
        return dw.to(out_dtype)
    if not accumulate:
        return out.copy_(dw)
    has_rows = (group_sizes > 0).view(-1, 1, 1)
    return out.copy_(torch.where(has_rows, out.float() + dw, out))


def _plane(tensor: GroupedTensor, direction: str) -> tuple[Tensor, Tensor, str]:
    """Codes, decode scales and kind: what an op needs of an operand."""
    codes, scale = getattr(tensor, direction), getattr(tensor, f"{direction}_scale")
    return codes, scale, kind_of(tensor.spec.quantizer)


@custom_op("acme::rows_times_weights", mutates_args=())
def rows_times_weights(
    x: Tensor,
    x_scale: Tensor,
    x_kind: str,
    w: Tensor,
    w_scale: Tensor,
    w_kind: str,
    group_sizes: Tensor,
    bias: Tensor | None,
    bias_scales: Tensor | None,
    transposed: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Each row times its group's matrix [N, K], or its transpose, plus its bias."""
    sizes = host_sizes(group_sizes, len(x))
    y = torch.zeros(len(x), w.shape[1 if transposed else 2], dtype=out_dtype, device=x.device)
    direction = "rowwise" if transposed else "columnwise"
    weights = matrices(w.flatten(0, 1), w_scale, w_kind, direction, [w.shape[1]] * len(w))
    operands = zip(spans(sizes), matrices(x, x_scale, x_kind, "rowwise", sizes), weights, strict=True)
    for group, (rows, x_g, w_g) in enumerate(operands):
        product = x_g @ (w_g.T if transposed else w_g)
        if bias is not None:
            weight = 1.0 if bias_scales is None else bias_scales[rows, None].float()
            product += weight * bias[group].float()
        y[rows] = product.to(out_dtype)
    return y


@rows_times_weights.register_fake
def _(
    x: Tensor,
    x_scale: Tensor,
    x_kind: str,
    w: Tensor,
    w_scale: Tensor,
    w_kind: str,
    group_sizes: Tensor,
    bias: Tensor | None,
    bias_scales: Tensor | None,
    transposed: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1 if transposed else 2]), dtype=out_dtype)


@custom_op("acme::columns_times_columns", mutates_args=())
def columns_times_columns(
    dy: Tensor, dy_scale: Tensor, dy_kind: str, x: Tensor, x_scale: Tensor, x_kind: str, group_sizes: Tensor
) -> Tensor:
    """dy_g.T @ x_g of each group in float32; zero for a group without rows."""
    sizes = host_sizes(group_sizes, len(x))
    dys = matrices(dy, dy_scale, dy_kind, "columnwise", sizes)
    xs = matrices(x, x_scale, x_kind, "columnwise", sizes)
    return torch.stack([dy_g.T @ x_g for dy_g, x_g in zip(dys, xs, strict=True)])


@columns_times_columns.register_fake
def _(
    dy: Tensor, dy_scale: Tensor, dy_kind: str, x: Tensor, x_scale: Tensor, x_kind: str, group_sizes: Tensor
) -> Tensor:
    return x.new_empty((group_sizes.shape[0], dy.shape[1], x.shape[1]), dtype=torch.float32)


def matrices(codes: Tensor, scale: Tensor, kind: str, direction: str, heights: list[int]) -> Iterator[Tensor]:
    """Each group's matrix, dequantized: `heights` rows of `codes` after one another."""
    tile_rows = rows_of_tiles(scale, kind, direction)
    by_group = one_scale_row_a_group(kind, direction)
    tile_row = 0
    for group, (rows, height) in enumerate(zip(spans(heights), heights, strict=True)):
        tile = tile_shape(kind, direction, height, codes.shape[1])
        down = -(-height // tile[0])
        first, count = (group, 1) if by_group else (tile_row, down)
        yield dequantize_matrix(codes[rows], tile_rows[first : first + count], tile)
        tile_row += down
