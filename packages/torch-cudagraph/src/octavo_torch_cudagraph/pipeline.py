"""make_graphed_pipeline: the chunks of a pipeline's stage in CUDA graphs, with several microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from octavo_torch.plugin_api import WARMUP
from octavo_torch_cudagraph.graphed import check_warmup
from octavo_torch_cudagraph.held import Held, held_by
from octavo_torch_cudagraph.modules import check_positional, sample_of, warmed_up
from octavo_torch_cudagraph.order import Position, Step, steps_of
from octavo_torch_cudagraph.passes import GraphedPass, Recorder


class GraphedPipeline:
    """The captured passes of a stage, which run in one order.

    forwards   forwards[c][m](*arguments) is the forward of chunk c's microbatch m, both counted from 0; its backward is
               autograd's
    """

    forwards: tuple[tuple[Callable[..., Any], ...], ...]

    def __init__(self, forwards: Sequence[Sequence[Callable[..., Any]]], position: Position) -> None:
        self.forwards = tuple(map(tuple, forwards))
        self._position = position

    def restart(self) -> None:
        """Begin again with the order's first step, after a step that was broken off."""
        self._position.restart()


def make_graphed_pipeline(
    chunks: Sequence[nn.Module],
    sample_arguments: Sequence[Sequence[Any]],
    order: Sequence[int],
    *,
    warmup: int = WARMUP,
    pool: Any = None,
    allow_unused_input: bool = False,
) -> GraphedPipeline:
    """A CUDA graph for each forward and each backward of a training step of one pipeline stage.

    chunks            the stage's modules: one, or several where stages are interleaved. They stay as they are
    sample_arguments  for each chunk those of one microbatch, as `make_graphed` takes them
    order             what the stage runs in a step, as Megatron-LM's schedule and TransformerEngine's `_order` say it:
                      c is a forward of chunk c, -c the backward of its oldest microbatch that has had none. One chunk
                      with two microbatches in flight: [1, 1, -1, 1, -1, -1]
    warmup, pool, allow_unused_input   as `make_graphed` has them

    Each microbatch has arguments, outputs and gradients of its own; what else a forward keeps for its backward is in
    memory that later passes of the order take over. So the graphs run in this order, step after step: another call is
    refused by name. Weight gradients are added by autograd, each from its microbatch's own tensor: give layers a
    `main_grad`, which all of them add to, where that memory counts.

    Raises as `make_graphed` does, ValueError for an order that does not fit the chunks, and at a call for the other
    mode, training or not, and for arguments by name.
    """
    check_warmup(warmup)
    if not isinstance(chunks, Sequence) or not chunks or not all(isinstance(chunk, nn.Module) for chunk in chunks):
        raise ValueError(f"chunks is a {type(chunks).__name__}; give a list of modules, at least one")
    if not isinstance(sample_arguments, Sequence) or len(sample_arguments) != len(chunks):
        given = len(sample_arguments) if isinstance(sample_arguments, Sequence) else type(sample_arguments).__name__
        raise ValueError(f"sample_arguments is {given} and there are {len(chunks)} chunks; give arguments for each")
    steps = steps_of(order, len(chunks))
    samples = [sample_of(chunk, given) for chunk, given in zip(chunks, sample_arguments, strict=True)]
    for number, sample in enumerate(samples):
        if sample.device != samples[0].device:
            raise ValueError(
                f"chunk {number} is on {sample.device} and chunk 0 on {samples[0].device}; give chunks of one stage"
            )
    record = Recorder(samples[0].device, pool)
    passes: dict[tuple[int, int], GraphedPass] = {}
    with warmed_up([*zip(chunks, samples, strict=True)], record, warmup, allow_unused_input) as written:
        for step in steps:
            at = step.chunk, step.microbatch
            if step.is_forward:
                arguments = sample_of(chunks[step.chunk], sample_arguments[step.chunk])
                passes[at] = GraphedPass(chunks[step.chunk], arguments, written[step.chunk])
                passes[at].record_forward(record)
                if not passes[at].is_differentiable:
                    raise ValueError(
                        f"nothing in chunk {step.chunk} requires a gradient, and order has its backward; give samples "
                        "or parameters that require one, or capture() a forward alone"
                    )
            else:
                passes[at].record_backward(record, allow_unused_input)
    position = Position(steps)
    forwards: list[list[Callable[..., Any]]] = [[] for _ in chunks]
    for (chunk, microbatch), run in sorted(passes.items(), key=lambda item: item[0]):
        run.in_order(position, Step(chunk, microbatch, is_forward=True))
        forwards[chunk].append(_forward_of(chunks[chunk], run))
    return GraphedPipeline(forwards, position)


def _forward_of(chunk: nn.Module, run: GraphedPass) -> Callable[..., Any]:
    training, held = chunk.training, Held(lambda: held_by(chunk))

    def forward(*given: Any, **named: Any) -> Any:
        check_positional(named)
        if chunk.training != training:
            raise ValueError(
                f"the chunk's training is {chunk.training} and it was captured with {training}; call the module "
                "itself, which is not graphed"
            )
        return run(given, held)

    return forward
