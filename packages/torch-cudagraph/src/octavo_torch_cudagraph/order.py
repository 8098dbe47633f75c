"""The order in which a pipeline's stage runs forwards and backwards, as frameworks write it: 1, 2, -2, -1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One forward or backward: of which chunk, and of which of its microbatches; both count from 0."""

    chunk: int
    microbatch: int
    is_forward: bool

    def __str__(self) -> str:
        return (
            f"the {'forward' if self.is_forward else 'backward'} of chunk {self.chunk}'s microbatch {self.microbatch}"
        )


def steps_of(order: Any, chunks: int) -> tuple[Step, ...]:
    """The steps of `order`: c is a forward of chunk c - 1, -c the backward of its oldest forward that has had none.

    Raises ValueError for an order that holds something else, leaves a chunk out, has a backward without a forward
    before it, or a forward without a backward.
    """
    if not isinstance(order, Sequence) or isinstance(order, str | bytes):
        raise ValueError(f"order is a {type(order).__name__}; give a sequence of integers such as [1, 1, -1, -1]")
    counts = [[0, 0] for _ in range(chunks)]
    steps = []
    for position, entry in enumerate(order):
        if isinstance(entry, bool) or not isinstance(entry, int) or not 1 <= abs(entry) <= chunks:
            raise ValueError(
                f"order[{position}] is {entry!r}; give c for a forward of chunk c and -c for a backward, c from 1 to "
                f"{chunks}"
            )
        chunk, is_forward = abs(entry) - 1, entry > 0
        forwards, backwards = counts[chunk]
        if not is_forward and backwards == forwards:
            raise ValueError(
                f"order[{position}] is {entry}, and every forward of chunk {-entry} before it has its backward; give "
                "it a forward first"
            )
        steps.append(Step(chunk, forwards if is_forward else backwards, is_forward))
        counts[chunk][0 if is_forward else 1] += 1
    for chunk, (forwards, backwards) in enumerate(counts):
        if not forwards or forwards != backwards:
            raise ValueError(
                f"order has {forwards} forwards of chunk {chunk + 1} and {backwards} backwards; give as many, at least "
                "one"
            )
    return tuple(steps)


class Position:
    """A place in the order of steps: graphs that share memory have to run in the order in which they were captured."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = tuple(steps)
        self._next = 0

    def check(self, step: Step) -> None:
        """ValueError unless `step` comes next."""
        due = self._steps[self._next]
        if step != due:
            raise ValueError(
                f"{step} was called and {due} comes next in the order that the graphs were captured in, whose memory "
                "they share; keep to it, or begin again with restart()"
            )

    def advance(self) -> None:
        """The step that came next has run; after the last one the first comes again."""
        self._next = (self._next + 1) % len(self._steps)

    def restart(self) -> None:
        """The first step comes next."""
        self._next = 0
