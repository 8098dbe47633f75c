"""DelayedWgrad: weight gradients that backward leaves for later, on the caller's stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo_torch.arrays.checks import told
from octavo_torch.compiler.graphs import GraphUnsafeError, is_capturing


class _Postponed:
    """One weight gradient: how it is made, what it reads, and since when that is there.

    versions   of the unquantized tensors that it reads: after a change in place the gradient would be another
    """

    __slots__ = ("captured", "event", "read", "run", "stream", "versions")

    def __init__(self, run: Callable[[], Iterable[Tensor]], operands: tuple[Any, ...]) -> None:
        self.run = run
        self.read = [leaf for leaf in pytree.tree_leaves(operands) if isinstance(leaf, Tensor)]
        self.versions = [(value, value._version) for value in operands if isinstance(value, Tensor)]
        self.captured = is_capturing()
        self.stream: Any = None
        if self.read[0].is_cuda:
            self.stream = torch.cuda.current_stream(self.read[0].device)
            self.event = self.stream.record_event()

    def arrive(self) -> None:
        """Make the gradient on the current stream, after what it reads."""
        for value, version in self.versions:
            if value._version != version:
                raise ValueError(
                    f"a tensor of shape {list(value.shape)} that a delayed weight gradient reads has changed in place "
                    "since backward; call backward_dw before that, or change a copy"
                )
        if self.stream is None:
            self.run()
            return
        if self.captured is not (is_capturing() or _is_captured(self.stream)):
            raise GraphUnsafeError(
                "backward and backward_dw are not in the same CUDA graph, or one of them is in none; call both inside "
                "the captured function"
            )
        here = torch.cuda.current_stream(self.stream.device)
        if here == self.stream:
            self.run()
            return
        here.wait_event(self.event)
        # the allocator knows of the stream alone on which a tensor was made
        for value in self.read:
            value.record_stream(here)
        for made in self.run():
            made.record_stream(self.stream)


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return is_capturing()


class DelayedWgrad:
    """Weight gradients that backward has left out, oldest first: give it to `grouped_linear` as `delayed_wgrad`.

    Backward then computes the other gradients and keeps what the weight's needs: the column codes of x and dy, or both
    unquantized where the recipe's wgrad slot is high precision. The weight's hooks run when its gradient arrives, once.
    `len()` is the number of backward passes with some left out. Copies and pickles hold none.

    anchor   takes the weight's place in autograd's graph: told of no gradient, autograd would run the weight's hooks
    """

    def __init__(self) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        self._left: deque[list[_Postponed]] = deque()
        self._owner: Any = None

    def __len__(self) -> int:
        return len(self._left)

    def postpone(self, owner: Any, run: Callable[[], Iterable[Tensor]], operands: tuple[Any, ...]) -> None:
        """For backward: keep `run`, which returns the tensors it made; `operands` are what it reads.

        owner   the call that this is the backward of, whose weights' gradients arrive together
        """
        postponed = _Postponed(run, operands)
        if self._left and owner is self._owner:
            self._left[-1].append(postponed)
        else:
            self._left.append([postponed])
            self._owner = owner

    def backward_dw(self, count: int | None = None) -> None:
        """Make the weight gradients of the oldest `count` backward passes, None: of all that are left.

        They are added to the weights' .grad, or go to `main_grad` as the call said. All of it is enqueued on the
        current stream, which waits for the backward that left them, with memory of its own:

            with torch.cuda.stream(side):
                layer.backward_dw()
            torch.cuda.current_stream().wait_stream(side)  # before gradients are read

        Raises ValueError where more are asked for than there are, or where an unquantized operand has changed since;
        GraphUnsafeError where backward was captured into a CUDA graph and this call is not, or the other way round.
        """
        left = len(self._left)
        if count is None:
            count = left
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= left:
            raise ValueError(
                f"count is {told(count)} and backward passes with weight gradients left out are {left}; "
                "give at most that, or None for all"
            )
        for _ in range(count):
            passes = self._left[0]
            while passes:
                passes[0].arrive()
                del passes[0]
            self._left.popleft()
        if not self._left:
            self._owner = None

    def __reduce__(self) -> tuple[type[DelayedWgrad], tuple[()]]:
        return DelayedWgrad, ()
