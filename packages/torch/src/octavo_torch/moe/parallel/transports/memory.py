"""PeerMemory: memory of every rank into which all ranks write."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PeerMemory(Protocol):
    """As many bytes of each rank, in the address space of all.

    size   bytes of a rank
    """

    size: int

    def of(self, rank: int) -> Tensor:
        """uint8 [size]: that rank's memory, which this rank may write."""

    def meet(self, what: str) -> None:
        """No rank gets past it before all have come to it, and then each sees what the others had written.

        On a GPU its stream waits, and not the host. `what` names the message in an error.
        """
