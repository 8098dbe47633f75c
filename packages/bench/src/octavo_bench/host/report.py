"""The tables of `octavo bench host` on the terminal."""

from __future__ import annotations

from itertools import groupby

from octavo_bench.harness.goals import verdict
from octavo_bench.harness.table import print_end, print_failures
from octavo_bench.host.row import SIDE, ApiRow, HostResults, HostRow
from octavo_registry.cli.output import print_line, print_table

_HOST = ("recipe", "experts", "host us", "10 % to 90 %", "goal", "backends")
_API = ("recipe", "API ms", "kernels ms", "API / kernels", "replay ms", "its kernels ms", "replay / them", "goal")


def print_results(results: HostResults) -> None:
    """The host's table, one a shape and vector of sizes, then notes and what did not work."""
    if results.host:
        title = f"Python's part of forward + backward of a GroupedLinear [G, {SIDE}, {SIDE}]"
        print_table(title, _HOST, [_host_cells(row) for row in results.host])
        print_line()
    for (shape, sizes), group in groupby(results.layers, key=lambda row: (row.shape, row.sizes)):
        title = f"{shape.label}, {sizes}: forward + backward of a layer and its kernels"
        print_table(title, _API, [_api_cells(row) for row in group])
        print_line()
    for note in results.notes:
        print_line(f"note: {note}")
    print_failures(results.failures)
    print_end(results, results.judged, "Goals reached", "No goals on this device")


def _host_cells(row: HostRow) -> list[str]:
    times = row.times
    spread = f"{times.low:.0f} to {times.high:.0f}"
    return [
        row.kind,
        str(row.groups),
        f"{times.median:.1f}",
        spread,
        verdict(row.goals),
        ", ".join(row.backends) or "-",
    ]


def _api_cells(row: ApiRow) -> list[str]:
    graph = row.graph
    return [
        row.kind,
        f"{row.api.median / 1e3:.3f}",
        f"{row.raw.median / 1e3:.3f}",
        f"{row.api.median / row.raw.median:.3f}",
        "-" if graph is None else f"{graph.alone.median / 1e3:.3f}",
        "-" if graph is None else f"{graph.kernels_us / 1e3:.3f}",
        "-" if graph is None else f"{graph.alone.median / graph.kernels_us:.3f}",
        verdict(row.goals),
    ]
