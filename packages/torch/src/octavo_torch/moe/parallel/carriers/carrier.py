"""Carrier: what takes a journey's rows from every rank to every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

Way = Literal["away", "home"]
"""Tokens and gradients go away to the experts, results home."""


class Delivery(Protocol):
    """What the other ranks have sent: planes [m, w], in the ranks' order. Each part is asked for once, what was sent
    ahead first, and the stream waits for it where it has to."""

    def ahead(self) -> list[Tensor]:
        """The planes that were sent ahead."""

    def rest(self) -> list[Tensor]:
        """The others."""


class Shares(NamedTuple):
    """Rows that come from each rank, and rows that go to each; None: as many for every rank."""

    received: list[int] | None = None
    sent: list[int] | None = None

    def back(self) -> Shares:
        """Of the way back."""
        return Shares(self.sent, self.received)


EQUAL = Shares()


class Outgoing(NamedTuple):
    """A plane of a message: [n, w] of any dtype, in the order of the ranks that its rows are for.

    senders   int64 [m], where the rows have another order or number: those that are sent
    """

    plane: Tensor
    senders: Tensor | None = None


class Carrier(Protocol):
    """Every rank sends the same messages in the same order.

    lends   what is delivered lies in memory that the next message may write: it is read by operations that are called
            before that one is sent, and what is kept is copied
    """

    lends: bool

    def send(self, what: str, way: Way, planes: Sequence[Outgoing], shares: Shares = EQUAL, ahead: int = 0) -> Delivery:
        """Starts one message, of whose planes the first `ahead` can be read before the others have come; `what` is its
        name in an error's."""
