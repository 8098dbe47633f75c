"""`octavo bench tiles`: its options, rows, table and verdict. It imports neither numpy nor a framework."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from octavo.recipe_base import Gemm
from octavo_bench.errors import RunError
from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.checks import check_installed
from octavo_bench.harness.goals import Goal
from octavo_bench.harness.options import Ops, Repeats, SizesOption, SomeKinds, gemms_of
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.results import Judged, Results
from octavo_bench.harness.shapes import DEEPGEMM, MODELS, SMALL, Shape
from octavo_bench.harness.table import Column, Table
from octavo_bench.harness.timing import Times


@dataclass(frozen=True, kw_only=True)
class TilesOptions(SizesOption):
    """See the command's help."""

    command: ClassVar[str] = "tiles"
    small: ClassVar[tuple[Shape, ...]] = SMALL
    published: ClassVar[tuple[Shape, ...]] = tuple({one.key: one for one in (*MODELS, *DEEPGEMM)}.values())
    published_quick: ClassVar[tuple[Shape, ...]] = MODELS[1:3]
    default_repeats: ClassVar[Repeats] = MappingProxyType(
        {("cuda", False): 10, ("cuda", True): 6, ("cpu", False): 2, ("cpu", True): 1}
    )

    ops: Ops = ""
    kinds: SomeKinds = "bf16,current,block"

    def check(self) -> None:
        """See `Options`; what is missing too."""
        super().check()
        gemms_of(self.ops)
        needed = ("torch", "octavo_torch", "octavo_native", "octavo_torch_native")
        check_installed(self.command, needed, "octavo-torch-native")

    @property
    def rows_per_problem(self) -> int:
        """Each recipe's operands and each of its GEMMs."""
        return len(self.chosen_kinds) * (1 + len(self.gemms))

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """In the order of a training step."""
        return gemms_of(self.ops)


SAME = 2.0**-7
"""Norm of the difference that another order of summation may leave in a bf16 result, generously."""


@dataclass(frozen=True, slots=True)
class TileTime:
    """One tile: what the model expects, what was measured, and how far its result is from the chosen tile's."""

    name: str
    predicted_us: float
    filled: float
    waves: float
    chosen: bool
    times: Times
    difference: float

    @property
    def same(self) -> bool:
        """Whether its result is the chosen one's."""
        return self.difference <= SAME


@dataclass(frozen=True)
class Sweep:
    """Every tile of one GEMM on one shape and vector of sizes, the chosen one first."""

    section: ClassVar[str] = "rows"

    shape: Shape
    sizes: str
    case: GemmCase
    tiles: tuple[TileTime, ...]

    @property
    def chosen(self) -> TileTime:
        """The model's choice."""
        return next(tile for tile in self.tiles if tile.chosen)

    @property
    def best(self) -> TileTime:
        """The fastest."""
        return min(self.tiles, key=lambda tile: tile.times.median)

    @property
    def same(self) -> bool:
        """Whether all tiles have one result."""
        return all(tile.same for tile in self.tiles)

    def measures(self, rows: Sequence[Any]) -> dict[str, float]:
        """The chosen tile's rate over the fastest one's."""
        return {"the best tile": self.best.times.median / self.chosen.times.median}

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "case": self.case.label,
            "gemm": self.case.gemm,
            "shape": list(self.shape.key),
            "name": self.shape.name,
            "sizes": self.sizes,
            "chosen": self.chosen.name,
            "best": self.best.name,
            "goal": goals[0].as_dict() if goals else None,
            "tiles": [
                {
                    "name": tile.name,
                    "predicted_us": round(tile.predicted_us, 3),
                    "us": tile.times.as_dict(),
                    "tflops": round(self.shape.tflops(tile.times.median), 1),
                    "filled": round(tile.filled, 4),
                    "waves": round(tile.waves, 3),
                    "chosen": tile.chosen,
                    "difference": tile.difference if math.isfinite(tile.difference) else None,
                }
                for tile in self.tiles
            ],
        }


class Tiles(Benchmark[TilesOptions]):
    """Every tile of the GEMM kernels against the one that is chosen.

    octavo-native's model predicts a time for each tile and chooses one; the table has predicted and measured times,
    in PyTorch. The exit code is 1 if a tile fails or gives another result. A choice that is worse than a goal
    allows is reported and is not a failure.
    """

    name = TilesOptions.command
    options = TilesOptions
    work = "octavo_bench.tiles.sweep:sweeps"

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
