"""Transport: what takes an exchange's rows from every rank to every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

Way = Literal["dispatch", "combine"]
"""Tokens and gradients go away to the experts, results home."""


class Delivery(Protocol):
    """What the other ranks have sent: planes [m, w], rows in the order of the ranks.

    `ahead` is called once, if at all, and then `rest` once; the caller's stream waits for what they return.
    """

    def ahead(self) -> list[Tensor]:
        """The planes that were sent ahead."""

    def rest(self) -> list[Tensor]:
        """The others."""


class Shares(NamedTuple):
    """How many rows come from each rank, and how many go to each; None: the same number for every rank."""

    received: list[int] | None = None
    sent: list[int] | None = None

    def back(self) -> Shares:
        """Of the way back."""
        return Shares(self.sent, self.received)


EQUAL = Shares()


class Outgoing(NamedTuple):
    """A plane of a message: [n, w] of any dtype, its rows in the order of the ranks that they are for.

    senders   int64 [m], the rows to send, where these are not all rows of the plane in their order
    """

    plane: Tensor
    senders: Tensor | None = None


class Transport(Protocol):
    """Every rank sends the same messages in the same order.

    lends   whether the next message may overwrite what was delivered: then it has to be read by operations that are
            called before that message is sent, and copied where it is kept
    """

    lends: bool

    def send(self, what: str, way: Way, planes: Sequence[Outgoing], shares: Shares = EQUAL, ahead: int = 0) -> Delivery:
        """Starts one message; of its planes the first `ahead` can be read before the others have arrived.

        what   the name of the message in an error's text
        """
