"""`octavo bench host`: its tables. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.results import Results
from octavo_bench.harness.run import Run
from octavo_bench.harness.table import BACKENDS, GOAL, Column, Table, number, share
from octavo_bench.host.options import SIDE, HostOptions
from octavo_bench.host.row import ApiRow, HostRow


class Host(Benchmark[HostOptions]):
    """What calling a layer costs beside its kernels, in torch: Python's time, the public API, a graph's gaps.

    Python's time of forward and backward is taken at several numbers of experts. A whole step through `grouped_linear`
    is held to its quantizers and GEMMs called one after the other, and a replay of its CUDA graph to the sum of its
    kernels as torch's profiler sees them. Exit code 1 where a row fails or nothing ran; a goal that is missed is
    reported and no failure.
    """

    name = HostOptions.command
    options = HostOptions
    sections: ClassVar[tuple[str, ...]] = ("host", "layers")

    def rows(self, run: Run[HostOptions]) -> Iterable[HostRow | ApiRow]:
        """See `Benchmark`."""
        from octavo_bench.host.work import host_rows

        return host_rows(run)

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """The host's table, and one per shape and vector of sizes."""
        host = f"Python's part of forward + backward of a GroupedLinear [G, {SIDE}, {SIDE}]"
        yield Table(HostRow, lambda row: host, _HOST)
        yield Table(
            ApiRow, lambda row: f"{row.shape.label}, {row.sizes}: forward + backward of a layer and its kernels", _API
        )


_HOST: tuple[Column[HostRow], ...] = (
    Column("recipe", lambda row: row.row.kind),
    Column("experts", lambda row: str(row.row.shape.groups)),
    Column("host us", lambda row: f"{row.row.times.median:.1f}"),
    Column("10 % to 90 %", lambda row: f"{row.row.times.low:.0f} to {row.row.times.high:.0f}"),
    GOAL,
    BACKENDS,
)
_API: tuple[Column[ApiRow], ...] = (
    Column("recipe", lambda row: row.row.kind),
    Column("API ms", lambda row: number(row.row.api.ms)),
    Column("kernels ms", lambda row: number(row.row.raw.ms)),
    share("API / kernels", "kernels"),
    Column("replay ms", lambda row: number(None if row.row.graph is None else row.row.graph.alone.ms)),
    Column("its kernels ms", lambda row: number(None if row.row.graph is None else row.row.graph.kernels_us / 1e3)),
    share("replay / them", "a replay's kernels"),
    GOAL,
)
