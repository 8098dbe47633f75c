"""Peer memory of GPUs that reach one another's: torch's symmetric memory, its CUDA backend, without multicast."""

from __future__ import annotations

import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from octavo_torch.moe.parallel.group import ExpertGroup


class SymmetricMemory:
    """A `PeerMemory`; every rank makes it at once, and outside of a capture.

    Where a rank does not come to `meet` within the group's timeout, the kernels of those that wait trap: both ranks'
    numbers are on stderr, and CUDA is an error in that process from then on. Nothing else can stop a kernel that waits.
    """

    def __init__(self, group: ExpertGroup, size: int, device: torch.device) -> None:
        self.size = size
        self._memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        with group.failures("the addresses of peer memory"):
            self._handle = symmetric.rendezvous(self._memory, group.group)
        self._of = [self._handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.ranks)]
        self._timeout_ms = int(group.timeout(device).total_seconds() * 1000)

    def of(self, rank: int) -> Tensor:
        """See PeerMemory."""
        return self._of[rank]

    def meet(self, what: str) -> None:
        """See PeerMemory."""
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)
