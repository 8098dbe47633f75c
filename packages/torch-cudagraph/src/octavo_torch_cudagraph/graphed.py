"""capture: a function and its CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo_torch.plugin_api import WARMUP, record_graph
from octavo_torch_cudagraph.arguments import Arguments
from octavo_torch_cudagraph.held import Held
from octavo_torch_cudagraph.restoring import restored

R = TypeVar("R")


class Graphed(Generic[R]):
    """A captured function: call it with new tensors, which are copied in, and the graph is replayed.

    graph     torch's CUDAGraph; `graph.pool()` is the pool of its memory
    inputs    the graph's own tensors, in the order of the arguments' tensors; whoever fills them calls `replay()`
    outputs   what the function returned, its tensors detached. They are the graph's: the next replay writes them
              again, so clone what has to last

    Parameters and whatever else the function reads beside its arguments are read where they were at the capture, with
    the values that they have at the replay: change them in place. The Python around the kernels does not run again.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, arguments: Arguments, outputs: R, held: Held, function: Callable[..., R]
    ) -> None:
        self.graph, self.outputs = graph, outputs
        # replays read the tensors that it closes over
        self._function = function
        self.inputs: tuple[Tensor, ...] = arguments.tensors
        self._arguments, self._held = arguments, held

    def __call__(self, *arguments: Any) -> R:
        """`outputs` for these arguments, on the current stream.

        Shapes, dtypes and devices are those of the capture, strides may be any, and what is no tensor has the value
        that it had: else ValueError, and nothing is replayed.
        """
        self._arguments.copy_in(arguments)
        return self.replay()

    def hold(self, held: Held) -> None:
        """Check `held` at each replay."""
        self._held = held

    def replay(self) -> R:
        """`outputs` for what `inputs` hold."""
        self._held.check()
        self.graph.replay()
        return self.outputs


def capture(
    function: Callable[..., R],
    *examples: Any,
    restore: Iterable[Tensor] = (),
    warmup: int = WARMUP,
    pool: Any = None,
) -> Graphed[R]:
    """`function` captured into a CUDA graph with arguments like `examples`.

    function   forward alone, or forward and backward: `torch.autograd.grad(y, ...)` inside is captured, too
    examples   tensors on one CUDA device, nested in lists, tuples and dictionaries if need be; their values are those
               of the warm-up. Other values (None, numbers, strings) become constants of the graph. ValueError for what
               a graph would keep by mistake: CPU tensors, numpy arrays, lists of sizes
    restore    tensors to get their values back after the warm-up, which is `warmup` real runs: states, seeds,
               main_grad buffers
    pool       another graph's `pool()`, where the two never run at once

    All plans inside are graph-safe: a layer that would take sizes from the host raises NoBackendError with the reasons.
    GraphUnsafeError where the function waits for the device.
    """
    check_warmup(warmup)
    arguments = Arguments(examples)
    with restored(restore):
        graph, made = record_graph(lambda: function(*arguments.values), arguments.device, warmup=warmup, pool=pool)
    return Graphed(graph, arguments, pytree.tree_map_only(Tensor, Tensor.detach, made), Held(), function)


def check_warmup(warmup: Any) -> None:
    """ValueError unless `warmup` is a number of runs that shows whether one waits."""
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 2:
        raise ValueError(
            f"warmup is {warmup!r}; give 2 or more: the first run may wait, the next one shows whether it does"
        )
