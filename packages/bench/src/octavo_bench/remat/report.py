"""The tables of `octavo bench remat` on the terminal."""

from __future__ import annotations

from itertools import groupby

from octavo_bench.harness.goals import verdict
from octavo_bench.harness.table import print_end, print_failures
from octavo_bench.remat.row import PEER, RematResults, RematRow
from octavo_registry.cli.output import print_line, print_table

_HEADER = ("recipe", "policy", "ms", "remat / it", "ragged_dot / it", "quantize", "fprop", "temporary GB", "compile s")


def print_results(results: RematResults) -> None:
    """A table a shape and vector of sizes, then notes and what did not work."""
    layers = f"{results.layers} layers{', unrolled' if results.unrolled else ''}"
    for (shape, sizes), group in groupby(results.rows, key=lambda row: (row.shape, row.sizes)):
        rows = list(group)
        title = f"experts of {shape.label}, {sizes}, {layers}: forward + backward in jax"
        print_table(title, (*_HEADER, "goal"), [_cells(row, rows) for row in rows])
        print_line()
    for note in results.notes:
        print_line(f"note: {note}")
    print_failures(results.failures)
    judged = [goal.passed for row in results.rows for goal in row.goals]
    print_end(results, judged, "Goals reached", "No goals here")


def _cells(row: RematRow, rows: list[RematRow]) -> list[str]:
    theirs = next((one.ms for one in rows if one.kind == PEER), None)
    return [
        row.kind,
        row.policy,
        f"{row.ms:.3f}",
        *(
            "-" if gain is None else f"{gain:.2f}x"
            for gain in (row.over_plain, None if theirs is None else theirs / row.ms)
        ),
        str(row.quantize),
        str(row.fprop),
        "-" if row.temporary_bytes is None else f"{row.temporary_bytes / 1e9:.2f}",
        f"{row.trace_s:.1f} + {row.compile_s:.1f}",
        verdict(row.goals),
    ]


def _times(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.2f}x"
