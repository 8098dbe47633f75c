"""One layer in torch: its calls from Python, its kernels alone, and its CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.options import Names
from octavo_bench.harness.problem import Data, Prepared, layer_plan
from octavo_bench.harness.recipes import GemmCase, recipe_of
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Call, Times, cuda_times_in_turn, host_us, summary
from octavo_bench.host.benchmark import Graph
from octavo_bench.peers.grouped_mm import check_aligned, grouped
from octavo_torch import GroupedLinear
from octavo_torch.plugin_api import record_graph

_WARM_UP = 4
"""Calls before those that are timed."""


def host_of_layer(engine: TorchEngine, kind: str, shape: Shape, backend: Names, repeats: int) -> Times:
    """Microseconds of the host for forward and backward of a `GroupedLinear`, none of them spent waiting on a GPU."""
    groups, k, n, rows = shape.key
    where: dict[str, Any] = {"device": engine.device, "dtype": torch.bfloat16}
    layer = GroupedLinear(groups, k, n, recipe=recipe_of(kind), backend=backend, seed=1, **where)
    x = torch.randn(rows, k, **where).requires_grad_()
    dy = torch.randn(rows, n, **where)
    sizes = torch.full((groups,), rows // groups, device=engine.device)
    return _of_training(engine, lambda: layer(x, sizes), (x, layer.weight), dy, repeats)


def host_of_torch(engine: TorchEngine, shape: Shape, repeats: int) -> Times:
    """The same of torch's own grouped GEMM in bf16: what autograd and three launches cost on this machine."""
    groups, k, n, rows = shape.key
    check_aligned([rows // groups])
    sides = ((rows, k), (groups, n, k), (rows, n))
    x, w, dy = (torch.randn(side, device=engine.device, dtype=torch.bfloat16) for side in sides)
    leaves = x.requires_grad_(), w.requires_grad_()
    ends = torch.arange(1, groups + 1, device=engine.device, dtype=torch.int32) * (rows // groups)
    return _of_training(engine, lambda: grouped(x, w, ends), leaves, dy, repeats)


def _of_training(
    engine: TorchEngine, forward: Callable[[], Tensor], leaves: Sequence[Tensor], dy: Tensor, repeats: int
) -> Times:
    """Of `forward` and the backward that a training step calls, into gradients that are not there yet."""

    def call() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(dy)  # type: ignore[no-untyped-call]

    return unhindered(engine, call, repeats, repeats)


def unhindered(engine: TorchEngine, call: Call, repeats: int, at_once: int) -> Times:
    """Host time of a call that does not wait for the device: from an empty queue on, `at_once` calls do not fill it."""
    for _ in range(_WARM_UP):
        call()
    spent: list[float] = []
    while len(spent) < repeats:
        if engine.cuda:
            torch.cuda.synchronize()
        spent += [host_us(call) for _ in range(at_once)]
    if engine.cuda:
        torch.cuda.synchronize()
    return summary(spent)


def raw_calls(engine: TorchEngine, data: Data, sizes: Sequence[int], kind: str, backend: Names) -> list[Call]:
    """The kernels of a step alone: quantizers and GEMMs as the registry bound them, one after the other."""
    prepared = Prepared(engine, data, sizes, layer_plan(engine, data.shape, recipe_of(kind), backend))
    quantize = prepared.quantize or [lambda: None] * len(data.sets)
    gemms = [prepared.call(GemmCase(kind, gemm)) for gemm in ("fprop", "dgrad", "wgrad")]

    def call_at(at: int) -> Call:
        calls = [quantize[at], *(calls[at] for calls in gemms)]

        def call() -> None:
            for one in calls:
                one()

        return call

    return [call_at(at) for at in range(len(data.sets))]


def graph_of(captured: Call) -> torch.cuda.CUDAGraph:
    """The CUDA graph of a step on the current device."""
    graph, _ = record_graph(captured, torch.device("cuda", torch.cuda.current_device()))
    return graph


def times_and_graph(ways: Sequence[Sequence[Call]], captured: Call, repeats: int) -> tuple[Times, Times, Graph]:
    """Times of two ways to run a step, and of its CUDA graph, one call of each in turn.

    The sum of the kernels, copies and fills of a replay is torch's profiler's, of replays in turn with nothing else.
    Raises RuntimeError where it sees no kernels of the device.
    """
    graph = graph_of(captured)
    first, second, replay = cuda_times_in_turn([*ways, [graph.replay]], repeats)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            graph.replay()
        torch.cuda.synchronize()
    total = sum(row.self_device_time_total for row in seen.key_averages()) / repeats
    if not total:
        raise RuntimeError("torch's profiler saw no kernels; CUPTI may be missing or in use")
    (alone,) = cuda_times_in_turn([[graph.replay]], repeats, warm_ms=0.0)
    return first, second, Graph(replay, alone, total)
