"""`octavo bench tiles`: its table and its verdict. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from octavo_bench.errors import RunError
from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.results import Judged, Results
from octavo_bench.harness.run import Run
from octavo_bench.harness.table import Column, Table
from octavo_bench.tiles.options import TilesOptions
from octavo_bench.tiles.row import Sweep, TileTime


class Tiles(Benchmark[TilesOptions]):
    """Every tile of octavo-native's GEMMs against the one that its model chooses, in torch.

    Predicted times stand beside measured ones. Exit code 1 where a tile fails or gives another result; a choice that is
    worse than a goal allows is reported and no failure.
    """

    name = TilesOptions.command
    options = TilesOptions

    def rows(self, run: Run[TilesOptions]) -> Iterable[Sweep]:
        """See `Benchmark`."""
        from octavo_bench.tiles.sweep import sweeps

        return sweeps(run)

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """A table per shape and vector of sizes, with a row per GEMM."""
        yield Table(Sweep, lambda sweep: f"{sweep.shape.label}, {sweep.sizes}", _COLUMNS)

    def match(self, rows: Sequence[Sweep]) -> Mapping[str, int]:
        """Of the tiles' results with each other."""
        same = sum(sweep.same for sweep in rows)
        return {"same": same, "differs": len(rows) - same}

    def closing(self, results: Results) -> Iterator[str]:
        """Tiles with another result, and the model's accuracy; a CPU has no tiles to choose from."""
        sweeps = [row.row for row in results.of(Sweep)]
        for sweep in sweeps:
            wrong = ", ".join(f"{tile.name} by {tile.difference:.2g}" for tile in sweep.tiles if not tile.same)
            if wrong:
                yield f"DIFFERS: {sweep.shape.label}, {sweep.sizes}, {sweep.case.label} {sweep.case.gemm}: {wrong}"
        ratios = [sweep.chosen.predicted_us / sweep.chosen.times.median for sweep in sweeps]
        if ratios and results.facts.device == "cuda":
            yield (
                f"Predicted over measured for the chosen tiles: median {statistics.median(ratios):.2f}, "
                f"{min(ratios):.2f} to {max(ratios):.2f}."
            )

    def conclude(self, results: Results) -> None:
        """RunError where a tile gave another result or a sweep failed."""
        differing = results.match["differs"]
        if differing or results.failures:
            raise RunError(
                f"{differing} sweeps have a tile with another result and {len(results.failures)} failed; "
                "the lines with DIFFERS and FAILED say which"
            )


def _of_best(row: Judged[Sweep]) -> str:
    word = "".join(" pass" if goal.passed else " MISS" for goal in row.goals)
    return f"{row.measures['the best tile']:.3f}{word}"


def _others(row: Judged[Sweep]) -> str:
    sweep = row.row
    others: list[TileTime] = [tile for tile in sweep.tiles if tile is not sweep.chosen and tile is not sweep.best]
    return "; ".join(f"{tile.name} {tile.times.median:.1f} ({tile.predicted_us:.1f})" for tile in others) or "-"


_COLUMNS: tuple[Column[Sweep], ...] = (
    Column("case", lambda row: row.row.case.label),
    Column("gemm", lambda row: row.row.case.gemm),
    Column("chosen", lambda row: row.row.chosen.name),
    Column("us", lambda row: f"{row.row.chosen.times.median:.1f}"),
    Column("predicted us", lambda row: f"{row.row.chosen.predicted_us:.1f}"),
    Column("best", lambda row: row.row.best.name),
    Column("us", lambda row: f"{row.row.best.times.median:.1f}"),
    Column("best / chosen", _of_best),
    Column("other tiles, us (predicted)", _others),
)
