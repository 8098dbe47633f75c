"""DelayedWgrad: weight gradients that backward leaves for later, to be computed on a stream of the caller's choice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo_torch.arrays.checks import brief
from octavo_torch.compiler.graphs import GraphUnsafeError, is_capturing


class _Running:
    """One call of autograd, of which nobody is told how it ends where it raises.

    number   of the call while it runs; -1 where that is not known: a compiled backward sees its graph alone
    """

    __slots__ = ("ended", "number")

    def __init__(self, number: int) -> None:
        self.number, self.ended = number, number < 0
        if not self.ended:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.ended = True

    @property
    def broken_off(self) -> bool:
        """Whether an error has ended it."""
        return not self.ended and self.number != _running_number()


def _running_number() -> int:
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


class _Postponed:
    """One weight gradient: the function that computes it, the tensors that this reads, and when those are ready.

    versions   of the tensors that are read, codes among them: a change in place would change the gradient
    of         the call of autograd that has postponed it
    """

    __slots__ = ("captured", "event", "inputs", "of", "run", "stream", "versions")

    def __init__(self, run: Callable[[], Iterable[Tensor]], operands: Sequence[object], of: _Running) -> None:
        self.run, self.of = run, of
        self.inputs = [leaf for leaf in pytree.tree_leaves(operands) if isinstance(leaf, Tensor)]
        self.versions = [(value, value._version) for value in self.inputs]
        self.captured = is_capturing()
        self.stream: torch.cuda.Stream | None = None
        if self.inputs[0].is_cuda:
            self.stream = torch.cuda.current_stream(self.inputs[0].device)
            self.event = self.stream.record_event()

    def compute(self) -> None:
        """Compute the gradient on the current stream, after the tensors that it reads are ready."""
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
        # the allocator knows only the stream on which a tensor was allocated
        for value in self.inputs:
            value.record_stream(here)
        for gradient in self.run():
            gradient.record_stream(self.stream)


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return is_capturing()


class DelayedWgrad:
    """Weight gradients that backward has postponed, oldest first: pass it to `grouped_linear` as `delayed_wgrad`.

    Backward then computes the other gradients and keeps what the weight's gradient needs: the columnwise codes of x and
    dy, or both unquantized where the recipe's wgrad slot is high precision. The weight's hooks run once, when its
    gradient is computed. `len()` is the number of backward passes with postponed gradients. `zero_grad` does not reach
    them: `clear` drops those of a batch that is given up. Copies and pickles are empty.

    anchor     takes the weight's place in autograd's graph: autograd would run the weight's hooks even for no gradient
    left_out   how many weight gradients backward passes have left out, because they were asked for others alone
    """

    def __init__(self) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        self.left_out = 0
        self._passes: deque[list[_Postponed]] = deque()
        self._last_owner: object = None
        self._last_parts: list[object] = []
        self._running = _Running(-1)

    def __len__(self) -> int:
        return len(self._passes)

    def postpone(
        self, owner: object, part: object, run: Callable[[], Iterable[Tensor]], operands: Sequence[object]
    ) -> None:
        """Called by backward: keep `run`, which reads `operands` and returns the tensors that it allocated.

        owner   the forward call whose backward this is: gradients of all its weights are computed together
        part    which of the call's weights it is; where it comes again, the graph was retained for another backward
        """
        if self._running.number != _running_number():
            self._running = _Running(_running_number())
        postponed = _Postponed(run, operands, self._running)
        same_call = bool(self._passes) and owner is self._last_owner
        if same_call and not any(part is other for other in self._last_parts):
            self._passes[-1].append(postponed)
            self._last_parts.append(part)
        else:
            self._passes.append([postponed])
            self._last_owner, self._last_parts = owner, [part]

    def backward_dw(self, count: int | None = None) -> None:
        """Compute the weight gradients of the oldest `count` backward passes; None: of all.

        They are added to the weights' .grad, or go to `main_grad` where the call asked for that. All work is enqueued
        on the current stream, which waits for the backward that postponed it:

            with torch.cuda.stream(side):
                layer.backward_dw()
            torch.cuda.current_stream().wait_stream(side)  # before gradients are read

        Raises ValueError where `count` exceeds the number of postponed passes, where one of them was broken off by an
        error, where an operand has changed since, and, once, where a backward pass was asked for other gradients alone;
        GraphUnsafeError where backward was captured into a CUDA graph and this call is not, or vice versa.
        """
        self._check_left_out()
        postponed = len(self._passes)
        if count is None:
            count = postponed
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= postponed:
            raise ValueError(
                f"count is {brief(count)} and {postponed} backward passes have postponed weight gradients; "
                "give at most that number, or None for all"
            )
        if any(gradient.of.broken_off for gradients in islice(self._passes, count) for gradient in gradients):
            raise ValueError(
                "an error broke off a backward pass that had postponed weight gradients, which belong to no step; drop "
                "them by delayed_wgrad.clear(), zero the other gradients, and run the batch again or leave it out"
            )
        for _ in range(count):
            gradients = self._passes[0]
            while gradients:
                gradients[0].compute()
                del gradients[0]
            self._passes.popleft()
        if not self._passes:
            self._last_owner, self._last_parts = None, []

    def clear(self) -> None:
        """Drop all gradients that are postponed, as `zero_grad` drops those that are there."""
        self._passes.clear()
        self._last_owner, self._last_parts, self.left_out = None, [], 0

    def _check_left_out(self) -> None:
        left_out, self.left_out = self.left_out, 0
        if left_out:
            raise ValueError(
                f"{left_out} weight gradients were not postponed: their backward was asked for other gradients alone, "
                "by torch.autograd.grad or a zero-bubble schedule of torch.distributed.pipelining. Leave delay_wgrad "
                "out under such a schedule, which postpones weight gradients itself; if none were wanted, call "
                "backward_dw again"
            )

    def __reduce__(self) -> tuple[type[DelayedWgrad], tuple[()]]:
        return DelayedWgrad, ()
