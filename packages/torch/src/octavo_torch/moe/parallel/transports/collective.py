"""By `all_to_all_single`, of any process group: NCCL's on GPUs, gloo's on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo_torch.moe.parallel.group import ExpertGroup
from octavo_torch.moe.parallel.transports.transport import EQUAL, Delivery, Outgoing, Shares, Way


class CollectiveTransport:
    """A `Transport` whose messages have arrived when they are sent: NCCL's kernels and a GEMM's take each other's
    multiprocessors, so that nothing is gained beside one."""

    lends = False

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group

    def send(self, what: str, way: Way, planes: Sequence[Outgoing], shares: Shares = EQUAL, ahead: int = 0) -> Delivery:
        """See Transport."""
        arrived = [self._group.all_to_all(what, _whole(plane), *shares) for plane in planes]
        return _Arrived(arrived[:ahead], arrived[ahead:])


class _Arrived:
    """A `Delivery` that is there."""

    def __init__(self, ahead: list[Tensor], rest: list[Tensor]) -> None:
        self._ahead, self._rest = ahead, rest

    def ahead(self) -> list[Tensor]:
        """See Delivery."""
        return self._ahead

    def rest(self) -> list[Tensor]:
        """See Delivery."""
        return self._rest


def _whole(plane: Outgoing) -> Tensor:
    return plane.take(slice(0, plane.count)).view(torch.uint8).view(plane.dtype)
