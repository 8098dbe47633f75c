"""One forward and its backward of a module as two CUDA graphs, and autograd around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from octavo_torch.plugin_api import ZeroGradient, capture_on, explained_waits, graph_safe
from octavo_torch_cudagraph.arguments import Arguments
from octavo_torch_cudagraph.held import Held
from octavo_torch_cudagraph.order import Position, Step

R = TypeVar("R")


class Replayed(Protocol):
    """A graph that can be replayed."""

    def replay(self) -> None:
        """Enqueue it on the current stream."""


class ForwardReplay(NamedTuple):
    """A replayed forward.

    number     of this replay, which its backward has to name
    outputs    the outputs that are tensors, detached
    constant   those of them that have no gradient
    """

    number: int
    outputs: tuple[Tensor, ...]
    constant: tuple[Tensor, ...]


class Recorder:
    """Captures functions one after the other on one stream, into one pool of memory.

    The graphs are replayed in the order in which they were captured: what a later one no longer needs of an earlier one
    lies in the same memory.
    """

    def __init__(self, device: torch.device, pool: Any) -> None:
        """pool: another graph's `pool()`; None: a pool of its own."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool

    def warm_up(self, function: Callable[[], object], count: int) -> None:
        """Run `function` on the stream: once when it may wait for the device, and then when it may not."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), graph_safe(), torch.cuda.stream(self._stream):
            function()
            with explained_waits():
                for _ in range(count - 1):
                    function()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def __call__(self, function: Callable[[], R]) -> tuple[Replayed, R]:
        """The graph of `function`, and what it returned."""
        with torch.cuda.device(self._device), graph_safe():
            return capture_on(self._stream, function, self._pool)


class GraphedPass:
    """A forward and a backward of `module` for arguments like `arguments`, which is this pass's own.

    Outputs are the graph's tensors, detached: the next forward of this pass writes them again. So are the gradients,
    until autograd has copied or added them: it never keeps one as `.grad`, which the next backward would write over.

    written   parameters whose main_grad the backward writes
    """

    def __init__(self, module: nn.Module, arguments: Arguments, written: Sequence[Tensor]) -> None:
        # kept, because make_graphed replaces module.forward
        self._function, self.arguments, self._written = module.forward, arguments, tuple(written)
        self._parameters = tuple(module.parameters())
        self._inputs: tuple[Tensor, ...] = (*arguments.tensors, *self._parameters)
        self._live: list[Tensor] = []
        self._grads: list[Tensor | None] = [None] * len(self._inputs)
        self._backward: Replayed | None = None
        self._replays = 0
        self._position: Position | None = None

    def in_order(self, position: Position, forward: Step) -> None:
        """Let this pass's forward and backward run only when their turn has come; `forward` is its forward's step."""
        self._position, self._steps = position, (forward, forward._replace(is_forward=False))

    def run_forward(self) -> list[Any]:
        """The module's outputs, flattened."""
        outputs, self._tree = pytree.tree_flatten(self._function(*self.arguments.values))
        self._live = [value for value in outputs if isinstance(value, Tensor) and value.requires_grad]
        return outputs

    def run_backward(self, grads: Sequence[Tensor], allow_unused: bool) -> list[Tensor | None]:
        """The gradients of the inputs that require one; the forward's own tensors are dropped."""
        outputs, self._live = self._live, []
        wanted = [value for value in self._inputs if value.requires_grad]
        return list(torch.autograd.grad(outputs, wanted, grads, allow_unused=allow_unused))

    def warm_up(self, allow_unused: bool) -> None:
        """Forward and backward once."""
        self.run_forward()
        if self._live:
            self.run_backward([torch.zeros_like(value) for value in self._live], allow_unused)

    def record_forward(self, record: Recorder) -> None:
        """Capture the forward; its own tensors live on for the backward."""
        self._forward, outputs = record(self.run_forward)
        self._outputs = [value.detach() if isinstance(value, Tensor) else value for value in outputs]
        self._differentiable = [value.requires_grad for value in outputs if isinstance(value, Tensor)]

    @property
    def is_differentiable(self) -> bool:
        """True where an output of the captured forward has a gradient."""
        return any(self._differentiable)

    def record_backward(self, record: Recorder, allow_unused: bool) -> None:
        """Capture the backward of the captured forward, if anything in it can be differentiated."""
        self._grad_outputs = [torch.empty_like(value) for value in self._live]
        if not self._live:
            return
        self._backward, grads = record(lambda: self.run_backward(self._grad_outputs, allow_unused))
        found = iter(grads)
        self._grads = [next(found) if value.requires_grad else None for value in self._inputs]

    def __call__(self, given: Sequence[Any], held: Held) -> Any:
        """The outputs, with autograd; ValueError for arguments that do not fit, and where `held` has changed."""
        leaves = self.arguments.check(given)
        for name, own, new in zip(self.arguments.names, self.arguments.tensors, leaves, strict=True):
            if new.requires_grad and not own.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{name} requires a gradient and the sample did not, so none would come; capture with a sample "
                    "that requires one"
                )
        held.check()
        tensors = iter(_Replay.apply(self, *leaves, *self._parameters))  # type: ignore[no-untyped-call]
        outputs = [next(tensors) if isinstance(value, Tensor) else value for value in self._outputs]
        return pytree.tree_unflatten(outputs, self._tree)

    def replay_forward(self, given: Sequence[Tensor]) -> ForwardReplay:
        """Copy the arguments `given` into this pass's own, and replay the forward."""
        if self._position is not None:
            self._position.check(self._steps[0])
        for own, new in zip(self.arguments.tensors, given, strict=False):
            if own is not new:
                own.copy_(new, non_blocking=True)
        self._forward.replay()
        if self._position is not None:
            self._position.advance()
        self._replays += 1
        outputs = tuple(value.detach() for value in self._outputs if isinstance(value, Tensor))
        constant = (
            value for value, has_gradient in zip(outputs, self._differentiable, strict=True) if not has_gradient
        )
        return ForwardReplay(self._replays, outputs, tuple(constant))

    def replay_backward(self, number: int, grads: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the inputs; ValueError where another forward has run since the one of this number."""
        if number != self._replays:
            raise ValueError(
                "another forward of this graph has run since the one whose backward this is, and has written over what "
                "it needs; run each backward before the next forward, or capture a pipeline with make_graphed_pipeline"
            )
        if self._position is not None:
            self._position.check(self._steps[1])
        if self._backward is None:
            return [None] * len(self._inputs)
        wanted = [grad for grad, has_gradient in zip(grads, self._differentiable, strict=True) if has_gradient]
        for own, new in zip(self._grad_outputs, wanted, strict=True):
            own.copy_(new)
        self._backward.replay()
        if self._position is not None:
            self._position.advance()
        for parameter in self._written:
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        gradients = [
            None if grad is None else grad.fresh() if isinstance(grad, ZeroGradient) else grad.detach()
            for grad in self._grads
        ]
        # without another reference autograd would keep such a tensor as .grad, and the next replay would write over it
        self._held = [grad for grad in gradients if not isinstance(grad, ZeroGradient)]
        return gradients


class _Replay(torch.autograd.Function):
    """The two replays of a pass."""

    @staticmethod
    def forward(ctx: Any, run: GraphedPass, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs that are tensors."""
        ctx.run = run
        replayed = run.replay_forward(inputs)
        ctx.number = replayed.number
        ctx.mark_non_differentiable(*replayed.constant)
        return replayed.outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs."""
        return (None, *ctx.run.replay_backward(ctx.number, grads))
