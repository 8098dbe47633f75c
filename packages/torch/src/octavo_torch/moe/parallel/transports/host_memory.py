"""Peer memory of processes on one host's CPUs: a mapped file of each rank. It is there for tests of the protocol."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor

from octavo_torch.moe.parallel.group import ExpertGroup


class HostMemory:
    """A `PeerMemory`; every rank makes it at once."""

    def __init__(self, group: ExpertGroup, size: int) -> None:
        self.size, self._group = size, group
        handle, path = tempfile.mkstemp(prefix="octavo-peer-")
        try:
            os.ftruncate(handle, size)
            paths = group.gather("the names of peer memory", path)
            self._of = [torch.from_file(each, shared=True, size=size, dtype=torch.uint8) for each in paths]
            self.meet("the names of peer memory")
        finally:
            os.close(handle)
            os.unlink(path)  # the mappings stay

    def of(self, rank: int) -> Tensor:
        """See PeerMemory."""
        return self._of[rank]

    def meet(self, what: str) -> None:
        """See PeerMemory."""
        with self._group.failures(what):
            dist.barrier(self._group.group)
