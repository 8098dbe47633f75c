"""Transport: what takes an exchange's rows from every rank to every other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo_torch.moe.parallel.transports.planes import as_words

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


class Outgoing(Protocol):
    """A plane of a message: rows [n, w] of any dtype, in the order of the ranks that they are for.

    A transport takes every row once, and may send some of them while it has others made.
    """

    @property
    def count(self) -> int:
        """n."""

    @property
    def keep(self) -> bool:
        """Whether what arrives of this plane is the caller's for good, also where the transport lends its messages."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the plane."""

    @property
    def kind(self) -> Tensor:
        """No rows, [0, v], of the integers that `take` gives."""

    def take(self, rows: slice) -> Tensor:
        """Those rows as integers, see `as_words`; nobody writes them until the message has arrived."""

    def write(self, rows: slice, out: Tensor) -> None:
        """Puts those rows, as `take` gives them, into `out`."""


@dataclass(frozen=True)
class Rows:
    """The `Outgoing` of rows that are there.

    senders   int64 [n], the rows of `plane` to send, where these are not all of them in their order
    """

    plane: Tensor
    senders: Tensor | None = None
    keep: bool = False

    @property
    def count(self) -> int:
        """See Outgoing."""
        return len(self.plane if self.senders is None else self.senders)

    @property
    def dtype(self) -> torch.dtype:
        """See Outgoing."""
        return self.plane.dtype

    @property
    def kind(self) -> Tensor:
        """See Outgoing."""
        return self._words[:0]

    def take(self, rows: slice) -> Tensor:
        """See Outgoing."""
        words = self._words
        return words[rows] if self.senders is None else words.index_select(0, self.senders[rows])

    def write(self, rows: slice, out: Tensor) -> None:
        """See Outgoing."""
        if self.senders is None:
            out.copy_(self._words[rows])
        else:
            torch.index_select(self._words, 0, self.senders[rows], out=out)

    @cached_property
    def _words(self) -> Tensor:
        return as_words(self.plane)


@dataclass(frozen=True)
class MadeRows:
    """The `Outgoing` of rows that `make` computes, whichever of them it is asked for, in a tensor of their own.

    like   [m, w], with rows of the same dtype and width
    """

    count: int
    like: Tensor
    make: Callable[[slice], Tensor]
    keep: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """See Outgoing."""
        return self.like.dtype

    @property
    def kind(self) -> Tensor:
        """See Outgoing."""
        return as_words(self.like[:0])

    def take(self, rows: slice) -> Tensor:
        """See Outgoing."""
        return as_words(self.make(rows))

    def write(self, rows: slice, out: Tensor) -> None:
        """See Outgoing."""
        out.copy_(self.take(rows))


class Transport(Protocol):
    """Every rank sends the same messages in the same order.

    lends   whether the next message may overwrite what was delivered: then it has to be read by operations that are
            called before that message is sent
    """

    lends: bool

    def send(self, what: str, way: Way, planes: Sequence[Outgoing], shares: Shares = EQUAL, ahead: int = 0) -> Delivery:
        """Starts one message; of its planes the first `ahead` can be read before the others have arrived.

        what   the name of the message in an error's text
        """
