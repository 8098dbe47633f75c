"""Expert parallelism: all_to_all_single sends rows to the ranks that have their experts, and results back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from octavo_torch.arrays.checks import brief, on_another_device
from octavo_torch.arrays.operands import check_layout, check_tensor
from octavo_torch.compiler.autograd_context import AutogradContext
from octavo_torch.moe.rows.permutation import Routing, permute, unpermute


class ExpertExchange:
    """How many rows each rank sends to each other rank, for one routing.

    group_sizes   int64 [G]: rows of each of this rank's experts, from all ranks, for grouped layers
    rows          R, the sum of group_sizes

    Every rank of `group` must create one, including ranks without rows. Expert e is number e % G of rank e // G. The
    constructor exchanges the sizes and reads two numbers per rank back to the host, where all_to_all_single takes its
    splits from, so an exchange cannot be part of a CUDA graph.
    """

    def __init__(self, group_sizes: Tensor, group: dist.ProcessGroup) -> None:
        """group_sizes: integers [E] of this rank's rows, sorted by expert; E is a multiple of the group's ranks."""
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group is {brief(group)}; give a torch.distributed.ProcessGroup")
        ranks = group.size()
        _check_sizes(group_sizes, ranks)
        sent = group_sizes.to(torch.int64).view(ranks, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=group)
        self._group = group
        self._sent, self._received = torch.stack((sent.sum(1), received.sum(1))).tolist()
        self.rows = sum(self._received)
        local = torch.arange(sent.shape[1], device=received.device).repeat(ranks)
        self._expert = torch.repeat_interleave(local, received.view(-1), output_size=self.rows)[:, None]
        self.group_sizes = received.sum(0)
        self._routing: Routing | None = None

    def to_experts(self, rows: Tensor) -> Tensor:
        """Send rows [M, K], sorted by expert; returns the rows of this rank's experts [R, K], sorted. Differentiable.

        Rows past the sum of the sizes are not sent, and their gradient is zero. Send probabilities as [M, 1].
        """
        sent = sum(self._sent)
        rows = check_tensor("rows", rows, "[M, K]")
        if rows.shape[0] < sent:
            raise ValueError(f"rows is {brief(rows)} and the sizes' sum is {sent}; give [M, K] with M >= {sent}")
        if rows.device != self.group_sizes.device:
            raise on_another_device("rows", rows.device, "the sizes", self.group_sizes.device)
        received = _all_to_all(rows[:sent], self._received, self._sent, self._group)
        sorted_rows, _, self._routing = permute(received, self._expert, self.group_sizes.shape[0])
        return sorted_rows

    def from_experts(self, rows: Tensor, to: int) -> Tensor:
        """Send the results [R, N] of this rank's experts back; returns [to, N] in the order of `to_experts`' rows.

        Differentiable. Rows past the sum of the sizes are zero. Raises ValueError where nothing was sent before.
        """
        if self._routing is None:
            raise ValueError("from_experts was called before to_experts; send rows first")
        sent = sum(self._sent)
        if not isinstance(to, int) or not sent <= to < 1 << 31:
            raise ValueError(
                f"to is {brief(to)} and the sizes' sum is {sent}; give the number of rows that to_experts took, "
                "which is below 2^31"
            )
        returned = _all_to_all(unpermute(rows, self._routing), self._sent, self._received, self._group)
        return torch.nn.functional.pad(returned, (0, 0, 0, to - sent))


class _Context(AutogradContext, Protocol):
    splits: tuple[list[int], list[int]]
    group: dist.ProcessGroup


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; gradients in the opposite direction."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits, ctx.group = (received, sent), group
        out = x.new_empty((sum(received), x.shape[1]))
        dist.all_to_all_single(out, x.contiguous(), received, sent, group)
        return out

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        received, sent = ctx.splits
        dx = grad.new_empty((sum(sent), grad.shape[1]))
        dist.all_to_all_single(dx, grad.contiguous(), sent, received, ctx.group)
        return dx, None, None, None


_all_to_all: Callable[..., Tensor] = _AllToAll.apply


def _check_sizes(group_sizes: object, ranks: int) -> None:
    if (
        not isinstance(group_sizes, Tensor)
        or group_sizes.dim() != 1
        or group_sizes.dtype not in (torch.int64, torch.int32)
    ):
        raise ValueError(
            f"group_sizes is {brief(group_sizes)}; give int32 or int64 [E], this rank's rows for every expert"
        )
    check_layout("group_sizes", group_sizes)
    if group_sizes.is_meta:
        raise ValueError("group_sizes is on meta and has no values to exchange; give them on the ranks' device")
    if group_sizes.shape[0] % ranks or not group_sizes.shape[0]:
        raise ValueError(
            f"group_sizes has {group_sizes.shape[0]} experts for {ranks} ranks; give a multiple of {ranks}"
        )


__all__ = ["ExpertExchange"]
