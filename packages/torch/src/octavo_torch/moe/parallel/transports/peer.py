"""By copies into the other ranks' memory, in which each rank has a part of its own in every message.

Message:   meet | each rank's rows into its part of every rank's memory | meet | read
           planes that go ahead are written first, and a meeting of their own follows them

The rows for another rank are made in pieces, and each is copied while the next is made. GPUs copy them by their copy
engines: a kernel that stores over a link holds the multiprocessors for as long as the link takes.
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
from octavo_torch.moe.parallel.transports.planes import row_bytes
from octavo_torch.moe.parallel.transports.transport import EQUAL, Delivery, Outgoing, Shares, Way

_ALIGNMENT = 256  # of planes, so that a copy takes 16 bytes at a time
_GRANULE = 2 << 20  # in which memory is made: pages of a GPU
_SMALLEST_PIECE = 8 << 20  # bytes: 20 microseconds of a link
_MOST_PIECES = 4

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
        memory, places = self._room(way, [plane.kind for plane in planes], [plane.count for plane in planes])
        if way == "dispatch" or way == self._last:
            with self._lane.beside():
                memory.meet(what)  # until then a rank may still read the last message
        message = _Message(self._lane, ahead)
        for number, (plane, (there, here)) in enumerate(zip(planes, places, strict=True), 1):
            kept = torch.empty_like(here) if plane.keep else None
            own = self._write(plane, there, here if kept is None else kept, message.sent)
            message.arriving.append(_Arriving(here, kept, own, plane.dtype))
            if number == ahead:
                with self._lane.beside():
                    memory.meet(what)
                    message.mark = self._lane.mark()
        with self._lane.beside():
            memory.meet(what)
        self._last = way
        return message

    def _write(self, plane: Outgoing, there: list[Tensor], here: Tensor, sent: list[Tensor]) -> slice:
        """The rows for each other rank to its memory, the next ranks first, so that all ranks' links are in use from
        the start; and this rank's own into `here`, while those are under way. Returns which those are."""
        ranks, rank, share = len(there), self._group.rank, len(there[0])
        pieces = _pieces(share, row_bytes(here))
        for target in (*range(rank + 1, ranks), *range(rank)):
            for piece in pieces:
                rows = plane.take(slice(target * share + piece.start, target * share + piece.stop))
                sent.append(rows)
                with self._lane.beside():
                    there[target][piece].copy_(rows)
        own = slice(rank * share, (rank + 1) * share)
        plane.write(own, here[own])
        return own

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


def _pieces(rows: int, width: int) -> list[slice]:
    """Of so many rows of `width` bytes: a few, for each is a launch or two, and none that is copied in no time."""
    count = min(max(rows * width // _SMALLEST_PIECE, 1), _MOST_PIECES)
    step = max(-(-rows // count), 1)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


class _Arriving(NamedTuple):
    """A plane of a message as this rank gets it.

    here   in memory that other ranks write, and the next message overwrites
    kept   in memory of the caller, where its own rows, the slice `own`, are; None where nothing is kept
    """

    here: Tensor
    kept: Tensor | None
    own: slice
    dtype: torch.dtype

    def read(self) -> Tensor:
        """The plane, when all of it has arrived."""
        if self.kept is not None:
            for others in (slice(0, self.own.start), slice(self.own.stop, None)):
                self.kept[others].copy_(self.here[others])
        words = self.here if self.kept is None else self.kept
        return words.view(torch.uint8).view(self.dtype)


class _Message:
    """A `Delivery`. What is sent becomes somebody else's memory as soon as nothing holds it, so the stream of a caller
    that raises before it has asked for the message waits, too.

    sent       what is copied to other ranks
    arriving   the planes, in their order
    mark       when those that go ahead have arrived
    """

    def __init__(self, lane: _Lane, ahead: int) -> None:
        self._lane, self._ahead, self._underway = lane, ahead, True
        self.sent: list[Tensor] = []
        self.arriving: list[_Arriving] = []
        self.mark: torch.cuda.Event | None = None

    def ahead(self) -> list[Tensor]:
        """See Delivery."""
        self._lane.join(self.mark)
        return [plane.read() for plane in self.arriving[: self._ahead]]

    def rest(self) -> list[Tensor]:
        """See Delivery."""
        self._finish()
        return [plane.read() for plane in self.arriving[self._ahead :]]

    def _finish(self) -> None:
        if self._underway:
            self._underway = False
            self._lane.join()
            self.sent.clear()

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
