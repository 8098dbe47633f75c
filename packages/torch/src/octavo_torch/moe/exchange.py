"""Expert parallelism: rows to the ranks that have their experts, and results back, by all_to_all_single."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo_torch.arrays.checks import told
from octavo_torch.arrays.operands import check_layout
from octavo_torch.moe.permutation import Routing, permute, unpermute


class ExpertExchange:
    """Who sends how many rows to whom, for one routing; made by every rank of `group`, one without rows too.

    group_sizes   int64 [G]: rows of each of this rank's experts, from all ranks, for grouped layers
    rows          R, their number

    Expert e is number e % G of rank e // G. Making one exchanges the sizes and reads 2 numbers a rank back to the host:
    all_to_all_single takes its splits from there, so an exchange is no part of a CUDA graph.
    """

    def __init__(self, group_sizes: Tensor, group: dist.ProcessGroup) -> None:
        """group_sizes: integers [E] of this rank's rows, sorted by expert; E is a multiple of the group's ranks."""
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group is {told(group)}; give a torch.distributed.ProcessGroup")
        ranks = group.size()
        _check_sizes(group_sizes, ranks)
        mine = group_sizes.to(torch.int64).view(ranks, -1)
        counts = torch.empty_like(mine)
        dist.all_to_all_single(counts, mine.contiguous(), group=group)
        self._group = group
        self._sent, self._received = torch.stack((mine.sum(1), counts.sum(1))).tolist()
        self.rows = sum(self._received)
        local = torch.arange(mine.shape[1], device=counts.device).repeat(ranks)
        self._expert = torch.repeat_interleave(local, counts.view(-1), output_size=self.rows)[:, None]
        self.group_sizes = counts.sum(0)
        self._routing: Routing | None = None

    def to_experts(self, rows: Tensor) -> Tensor:
        """[M, K] rows sorted by expert to [R, K], this rank's experts' rows sorted by expert; differentiable.

        Rows past the sum of the sizes stay here, and their gradient is zero. Probabilities travel as [M, 1].
        """
        sent = sum(self._sent)
        if not isinstance(rows, Tensor) or rows.dim() != 2 or rows.shape[0] < sent:
            raise ValueError(f"rows is {told(rows)} and the sizes' sum is {sent}; give [M, K] with M >= {sent}")
        check_layout("rows", rows)
        came = _all_to_all(rows[:sent], self._received, self._sent, self._group)
        sorted_rows, _, self._routing = permute(came, self._expert, self.group_sizes.shape[0])
        return sorted_rows

    def from_experts(self, rows: Tensor, to: int) -> Tensor:
        """[R, N] results of this rank's experts to [to, N], each in its row's place of `to_experts`; differentiable.

        Rows past the sum of the sizes are zero. Raises ValueError where nothing was sent before.
        """
        if self._routing is None:
            raise ValueError("from_experts was called before to_experts; send rows first")
        sent = sum(self._sent)
        if not isinstance(to, int) or to < sent:
            raise ValueError(f"to is {told(to)} and the sizes' sum is {sent}; give the rows that to_experts had")
        came = _all_to_all(unpermute(rows, self._routing), self._sent, self._received, self._group)
        return torch.nn.functional.pad(came, (0, 0, 0, to - sent))


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; gradients the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits, ctx.group = (received, sent), group
        out = x.new_empty((sum(received), x.shape[1]))
        dist.all_to_all_single(out, x.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        received, sent = ctx.splits
        back = grad.new_empty((sum(sent), grad.shape[1]))
        dist.all_to_all_single(back, grad.contiguous(), sent, received, ctx.group)
        return back, None, None, None


_all_to_all: Callable[..., Tensor] = _AllToAll.apply


def _check_sizes(group_sizes: Any, ranks: int) -> None:
    if (
        not isinstance(group_sizes, Tensor)
        or group_sizes.dim() != 1
        or group_sizes.dtype not in (torch.int64, torch.int32)
    ):
        raise ValueError(
            f"group_sizes is {told(group_sizes)}; give int32 or int64 [E], this rank's rows for each expert of all"
        )
    if group_sizes.shape[0] % ranks or not group_sizes.shape[0]:
        raise ValueError(
            f"group_sizes has {group_sizes.shape[0]} experts for {ranks} ranks; give a number that the ranks divide"
        )


__all__ = ["ExpertExchange"]
