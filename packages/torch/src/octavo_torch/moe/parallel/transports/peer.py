"""By stores into the other ranks' memory, in which each rank has a part of its own in every message.

Message:   meet | each rank's rows into its part of every rank's memory | meet | read
           planes that go ahead are written first, and a meeting of their own follows them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from octavo_torch.compiler.graphs import GraphUnsafeError, is_capturing
from octavo_torch.memo import Memo
from octavo_torch.moe.parallel.group import ExpertGroup
from octavo_torch.moe.parallel.transports.memory import PeerMemory
from octavo_torch.moe.parallel.transports.planes import as_words, row_bytes
from octavo_torch.moe.parallel.transports.transport import EQUAL, Delivery, Outgoing, Shares, Way

_ALIGNMENT = 256  # of planes, so that a copy takes 16 bytes at a time
_GRANULE = 2 << 20  # in which memory is made: pages of a GPU

MakeMemory = Callable[[int], PeerMemory]
"""Of that many bytes per rank; every rank calls it at once."""


class _Places(NamedTuple):
    """Of one plane: its part of each rank's memory, as this rank writes it; and what all ranks have written here."""

    there: list[Tensor]
    here: Tensor


class PeerTransport:
    """A `Transport` of static buffers. Its messages are under way beside what the caller's stream does until they are
    asked for; on a GPU the host waits for nothing.

    One piece of memory for each way serves all layers of the group: a message begins when every rank has read the one
    before. It grows where a call needs more, and what it has outgrown stays, because a captured graph may write it.
    """

    lends = True

    def __init__(self, group: ExpertGroup, device: torch.device, make: MakeMemory) -> None:
        self._group, self._make = group, make
        self._lane = _Lane(device)
        self._memories: dict[Way, PeerMemory] = {}
        self._outgrown: list[PeerMemory] = []
        self._last: Way = "combine"
        self._places: Memo[list[_Places]] = Memo()

    def send(self, what: str, way: Way, planes: Sequence[Outgoing], shares: Shares = EQUAL, ahead: int = 0) -> Delivery:
        """See Transport."""
        assert shares == EQUAL  # of static buffers
        words = [as_words(plane) for plane, _ in planes]
        counts = [len(plane if senders is None else senders) for plane, senders in planes]
        memory, places = self._room(way, words, counts)
        mark = None
        with self._lane.beside():
            if way == "dispatch" or way == self._last:
                memory.meet(what)  # until then a rank may still read the last message
            for number, (plane, (there, _), (_, senders)) in enumerate(zip(words, places, planes, strict=True), 1):
                _write(plane, there, senders, self._group.rank)
                if number == ahead:
                    memory.meet(what)
                    mark = self._lane.mark()
            memory.meet(what)
        self._last = way
        here = [
            place.here.view(torch.uint8).view(plane.dtype) for place, (plane, _) in zip(places, planes, strict=True)
        ]
        return _Message(self._lane, words, mark, here[:ahead], here[ahead:])

    def _room(self, way: Way, words: list[Tensor], counts: list[int]) -> tuple[PeerMemory, list[_Places]]:
        starts, end = [], 0
        for plane, count in zip(words, counts, strict=True):
            starts.append(end)
            end += -(-count * row_bytes(plane) // _ALIGNMENT) * _ALIGNMENT
        memory = self._memory(way, end)
        key = (way, memory.size, *((plane.dtype, plane.shape[1]) for plane in words), *counts)
        return memory, self._places.get(key, lambda: self._cut(memory, words, counts, starts), memory)

    def _memory(self, way: Way, size: int) -> PeerMemory:
        memory = self._memories.get(way)
        if memory is not None and memory.size >= size:
            return memory
        if is_capturing():
            raise GraphUnsafeError(
                f"the ranks of ep= need {size} bytes of peer memory for what goes {way}, and a CUDA graph is being "
                "captured; run forward and backward once before the capture, as octavo_torch_cudagraph.capture does"
            )
        if memory is not None:
            self._outgrown.append(memory)
        memory = self._memories[way] = self._make(-(-max(size, 1) // _GRANULE) * _GRANULE)
        return memory

    def _cut(self, memory: PeerMemory, words: list[Tensor], counts: list[int], starts: list[int]) -> list[_Places]:
        ranks, rank = self._group.ranks, self._group.rank
        places = []
        for plane, count, start in zip(words, counts, starts, strict=True):
            width, share = row_bytes(plane), count // ranks
            wholes = [
                memory.of(each)[start : start + count * width].view(plane.dtype).view(count, plane.shape[1])
                for each in range(ranks)
            ]
            places.append(_Places([whole[rank * share : (rank + 1) * share] for whole in wholes], wholes[rank]))
        return places


def _write(plane: Tensor, there: list[Tensor], senders: Tensor | None, rank: int) -> None:
    """The rows for each rank to it, the next ranks first: all ranks' links are in use from the start."""
    ranks, share = len(there), len(there[0])
    for target in (*range(rank + 1, ranks), *range(rank + 1)):
        own = slice(target * share, (target + 1) * share)
        if senders is None:
            there[target].copy_(plane[own])
        else:
            torch.index_select(plane, 0, senders[own], out=there[target])


class _Message:
    """A `Delivery`. What is sent becomes somebody else's memory as soon as nothing holds it, so the stream of a caller
    that raises before it has asked for the message waits, too."""

    def __init__(
        self,
        lane: _Lane,
        sent: list[Tensor],
        mark: torch.cuda.Event | None,
        ahead: list[Tensor],
        rest: list[Tensor],
    ) -> None:
        self._lane, self._sent, self._mark = lane, sent, mark
        self._ahead, self._rest = ahead, rest

    def ahead(self) -> list[Tensor]:
        """See Delivery."""
        self._lane.join(self._mark)
        return self._ahead

    def rest(self) -> list[Tensor]:
        """See Delivery."""
        self._finish()
        return self._rest

    def _finish(self) -> None:
        if self._sent:
            self._lane.join()
            self._sent.clear()

    def __del__(self) -> None:
        self._finish()


class _Lane:
    """A stream beside the caller's; on a CPU nothing."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is called inside follows what the current stream has been given, and does not hold it up."""
        stream = self._stream
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """What the lane has been given until now."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, mark: torch.cuda.Event | None = None) -> None:
        """What the current stream is given from now on follows the lane, or what it had been given at `mark`."""
        if self._stream is None:
            return
        stream = torch.cuda.current_stream(self._stream.device)
        if mark is None:
            stream.wait_stream(self._stream)
        else:
            stream.wait_event(mark)
