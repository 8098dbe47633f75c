"""CUDA graphs of several calls, and runs that take turns; scripts of this folder use it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

from octavo_bench.harness.timing import turn_order

TURNS = 12
Run = Callable[[], object]


def graph_of(run: Run, calls: int) -> torch.cuda.CUDAGraph:
    """So many calls."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph


def in_turns(runs: Mapping[str, Run], calls: int) -> dict[str, float]:
    """Median microseconds of a call over TURNS turns; every run makes `calls` of them."""
    names, times = list(runs), {name: list[float]() for name in runs}
    for turn in range(TURNS + 1):
        for at in turn_order(len(names), turn):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            runs[names[at]]()
            end.record()
            end.synchronize()
            if turn:  # the first one warms up
                times[names[at]].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: round(statistics.median(each), 2) for name, each in times.items()}
