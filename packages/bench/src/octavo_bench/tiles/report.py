"""The tables of `octavo bench tiles` on the terminal."""

from __future__ import annotations

import statistics
from itertools import groupby

from octavo_bench.harness.table import print_end, print_failures
from octavo_bench.tiles.row import Sweep, TileRow, TilesResults
from octavo_registry.cli.output import print_line, print_table

_HEADER = ("case", "gemm", "chosen", "us", "predicted us", "best", "us", "best / chosen", "other tiles, us (predicted)")


def print_results(results: TilesResults) -> None:
    """A table a shape with a row a GEMM, then the model's accuracy and what did not work."""
    for (shape, sizes), group in groupby(results.sweeps, key=lambda sweep: (sweep.shape, sweep.sizes)):
        print_table(f"{shape.label}, {sizes}", _HEADER, [_cells(sweep, bool(results.judged)) for sweep in group])
        print_line()
    for sweep in results.differing:
        wrong = ", ".join(f"{tile.name} by {tile.difference:.2g}" for tile in sweep.tiles if not tile.same)
        print_line(f"DIFFERS: {sweep.shape.label}, {sweep.sizes}, {sweep.case.label} {sweep.case.gemm}: {wrong}")
    print_failures(results.failures)
    ratios = [sweep.chosen.predicted_us / sweep.chosen.times.median for sweep in results.sweeps]
    if ratios and results.judged:
        print_line(
            f"Predicted over measured for the chosen tiles: median {statistics.median(ratios):.2f}, "
            f"{min(ratios):.2f} to {max(ratios):.2f}."
        )
    print_end(results, results.judged, "Choices within 3 %", "No tiles to choose on this device")


def _cells(sweep: Sweep, judged: bool) -> list[str]:
    chosen, best = sweep.chosen, sweep.best
    word = ("pass" if sweep.goal.passed else "MISS") if judged else ""
    others = [tile for tile in sweep.tiles if tile is not chosen and tile is not best]
    return [
        sweep.case.label,
        sweep.case.gemm,
        chosen.name,
        f"{chosen.times.median:.1f}",
        f"{chosen.predicted_us:.1f}",
        best.name,
        f"{best.times.median:.1f}",
        f"{sweep.goal.reached:.3f} {word}".strip(),
        "; ".join(_told(tile) for tile in others) or "-",
    ]


def _told(tile: TileRow) -> str:
    return f"{tile.name} {tile.times.median:.1f} ({tile.predicted_us:.1f})"
