"""`octavo bench`: the command line. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from typing import Any

import typer

from octavo_bench.ep.benchmark import Ep
from octavo_bench.gemm.benchmark import GemmBenchmark
from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.perform import command_of
from octavo_bench.host.benchmark import Host
from octavo_bench.mlp.benchmark import Mlp
from octavo_bench.moe.benchmark import Moe
from octavo_bench.quantize.benchmark import Quantize
from octavo_bench.remat.benchmark import Remat
from octavo_bench.step.benchmark import Step
from octavo_bench.tiles.benchmark import Tiles

BENCHMARKS: tuple[Benchmark[Any], ...] = (
    Quantize(),
    GemmBenchmark(),
    Step(),
    Mlp(),
    Moe(),
    Host(),
    Tiles(),
    Remat(),
    Ep(),
)

app = typer.Typer(add_completion=False)
for benchmark in BENCHMARKS:
    app.command(benchmark.name)(command_of(benchmark))


@app.callback()
def bench() -> None:
    """Time kernels and layers against the hardware and other libraries."""
