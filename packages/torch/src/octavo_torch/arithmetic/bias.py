"""Gradients of the bias and of its per-row scales."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_torch.arithmetic.groups import RowGroups


def bias_grads(
    dy: Tensor, sizes: Tensor, bias: Tensor | None, bias_scales: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """fp32 gradients of bias [G, N] and, where given, of bias_scales [M], sums in a fixed order.

    db[g] = sum of s[r] * dy[r] over the rows of g; ds[r] = dy[r] . bias[g].
    """
    groups = RowGroups(sizes, dy.shape[0])
    clean = torch.where(groups.valid[:, None], dy.float(), 0.0)
    ds = None
    scaled = clean
    if bias_scales is not None:
        scales = torch.where(groups.valid, bias_scales.float(), 0.0)
        scaled = clean * scales[:, None]
        if bias is not None:
            rows = torch.where(groups.valid[:, None], bias.float().index_select(0, groups.safe_group), 0.0)
            ds = (clean * rows).sum(1)
    return _group_sums(scaled, groups), ds


def _group_sums(value: Tensor, groups: RowGroups) -> Tensor:
    """fp32 [G, N]: within panels of rows first, then over each group's panels."""
    size = 64
    rows, real, _ = groups.panels(size)
    if not groups.rows:
        return value.new_zeros((groups.count, value.shape[1]))
    panels = value.index_select(0, rows.reshape(-1)).view(*rows.shape, -1)
    partial = panels.masked_fill_(~real[:, :, None], 0.0).sum(1)
    number, _ = groups.blocks_of(size)
    # in a fixed order, where an indexed addition would race; a product with ones and zeros would bring an infinity of
    # one group to all others. unsafe: lengths are not read on the host
    sums: Tensor = torch.segment_reduce(partial.double(), "sum", lengths=number, axis=0, unsafe=True)
    return sums.float()
