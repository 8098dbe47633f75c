"""Calls of one kind, in which everything that decides about the launches is the same: one is written down for all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from octavo_registry.contract.recording import MakeRecorder
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.compiler.transforms import is_wrapped
from octavo_torch.memo import Bounded
from octavo_torch.recording.recorded_pass import RecordedPass
from octavo_torch.recording.tape import Tape, is_writing

Given = list[Tensor | None]
"""The tensors that a pass reads or changes."""

Compose = Callable[[Callable[[str], None]], Sequence[Tensor | None]]
"""A backward as Python composes it: its results. It calls what it gets with the name of what it has read."""

Kept = TypeVar("Kept")

_PIECE = 16


class RecordedCalls(Generic[Kept]):
    """The passes of calls of one kind.

    composed   whether such calls cannot be written down
    forward    None until one is
    kept       what that forward leaves for its backward, without tensors
    backward   by the gradients that are needed and shapes; None for one that cannot be written down
    """

    __slots__ = ("backward", "composed", "forward", "kept")

    forward: RecordedPass | None
    kept: Kept

    def __init__(self) -> None:
        self.composed = False
        self.forward = None
        self.backward: Bounded[Hashable, RecordedPass | None] = Bounded()

    def run_backward(
        self,
        needs: Hashable,
        given: Given,
        make: MakeRecorder[Tensor],
        compose: Compose,
        done_with: Callable[[str], None],
    ) -> tuple[Sequence[Tensor | None], bool]:
        """The results of a backward on `given`, dy first, and whether it was run again.

        needs       what decides about it besides `given`
        done_with   is called with the name of what it has read
        """
        dy = given[0]
        assert dy is not None  # of every backward
        # a caller may have replaced the .data of what autograd saved, and launches get addresses alone
        kind = needs, *shapes_of(given)
        if kind not in self.backward and not is_writing():
            return self._write_backward(kind, given, Tape(make, dy, given), compose, done_with), False
        again = self.backward.get(kind)
        return (compose(done_with), False) if again is None else (again.run(given, dy, done_with), True)

    def _write_backward(
        self,
        kind: Hashable,
        given: Given,
        tape: Tape,
        compose: Compose,
        done_with: Callable[[str], None],
    ) -> Sequence[Tensor | None]:

        def stop(name: str) -> None:
            tape.stop(name)
            done_with(name)

        with tape:
            found = compose(stop)
        self.backward[kind] = repeatable(tape, given, found)
        return found

    def set_forward(self, forward: RecordedPass | None, kept: Kept) -> None:
        """Says what was written down, if anything could be."""
        self.composed, self.kept = forward is None, kept
        self.forward = forward  # last, because from now on another thread may run it


class Kinds(Generic[Kept]):
    """The kinds of calls of one plan."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: Bounded[Hashable, RecordedCalls[Kept]] = Bounded()

    def of(self, kind: Hashable) -> RecordedCalls[Kept] | None:
        """What is written down of such calls; None where they are composed, or the first of them has just come.

        The first may be the last: of numbers of tokens that never repeat, writing down would not pay.
        """
        if is_writing():
            return None
        recorded = self._kinds.get(kind)
        if recorded is None:
            self._kinds[kind] = RecordedCalls()
            return None
        return None if recorded.composed else recorded


def readable_in_place(operands: Given, others: Sequence[Tensor]) -> Given | None:
    """The operands, and then the others. None where kernels would read copies of them: they have to be plain tensors,
    contiguous or weights of which the plan knows that they lie transposed, and operands from a multiple of 16 bytes on.
    """
    given = [*operands, *others]
    for place, tensor in enumerate(given):
        if tensor is not None and not (
            is_plain(tensor)
            and not is_wrapped(tensor)
            and (tensor.is_contiguous() or (tensor.dim() == 3 and tensor.mT.is_contiguous()))
            and tensor.data_ptr() != 0
            and (place >= len(operands) or tensor.data_ptr() % _PIECE == 0)
        ):
            return None
    return given


def shapes_of(given: Given) -> list[tuple[torch.Size, torch.dtype] | None]:
    """A part of what a kind is."""
    return [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in given]


def repeatable(tape: Tape, given: Given, results: Sequence[Tensor | None]) -> RecordedPass | None:
    """The pass that `tape` has written down; None where it cannot be run again."""
    try:
        return RecordedPass(tape, given, results)
    except ValueError:
        return None
