"""`octavo bench quantize`: its tables and its verdict. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from octavo_bench.errors import RunError
from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.results import Judged, Results
from octavo_bench.harness.run import Run
from octavo_bench.harness.table import Column, Table, number
from octavo_bench.harness.timing import Times
from octavo_bench.quantize.options import QuantizeOptions
from octavo_bench.quantize.row import DIFFERS, EQUAL, QuantizeRow


class Quantize(Benchmark[QuantizeOptions]):
    """Grouped quantization, each recipe: time against the bytes it has to move, and against torch.compile.

    Every case is compared with the definition, bit for bit, before it is timed. Exit code 1 where bits differ or a
    case fails; a goal that is missed is reported and no failure.
    """

    name = QuantizeOptions.command
    options = QuantizeOptions

    def rows(self, run: Run[QuantizeOptions]) -> Iterable[QuantizeRow]:
        """See `Benchmark`."""
        from octavo_bench.quantize.work import quantize_rows

        return quantize_rows(run)

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """A table per shape and grouping; weights stand in the table of the rows that they go with."""
        copies = results.parts["copy_tb_per_s"]

        def title(row: QuantizeRow) -> str:
            *height, cols = row.sides
            rows = height[0] if len(height) == 1 else height[0] * height[1]
            rate = copies.get(f"{rows}x{cols}, {row.grouping}")
            copy = "" if rate is None else f", a copy moves {rate:.2f} TB/s"
            return f"{rows}x{cols}, {row.grouping} groups, {results.facts.dtype}{copy}"

        yield Table(QuantizeRow, title, _CUDA if results.facts.device == "cuda" else _CPU)

    def match(self, rows: Sequence[QuantizeRow]) -> Mapping[str, int]:
        """Of bits with the definition's."""
        return {
            "equal": sum(row.match == EQUAL for row in rows),
            "differs": sum(row.match.startswith(DIFFERS) for row in rows),
        }

    def closing(self, results: Results) -> Iterator[str]:
        """What the rows note, each once."""
        for note, count in Counter(note for row in results.rows for note in row.row.notes).items():
            yield f"note, {count} rows: {note}"

    def conclude(self, results: Results) -> None:
        """RunError where bits differ or a case failed."""
        differing = results.match["differs"]
        if differing or results.failures:
            raise RunError(
                f"{differing} rows differ from the definition and {len(results.failures)} failed; "
                "the match column and the lines with FAILED say which"
            )


def _per_element(row: QuantizeRow) -> str:
    return "-" if row.case == "plan" else f"{row.bytes_total / row.elements:.3f}"


def _median(times: Times | None, form: str) -> str:
    return number(None if times is None else times.median, form)


def _goal(row: Judged[QuantizeRow]) -> str:
    return next((f"{goal.needed:.2f} {'pass' if goal.passed else 'MISS'}" for goal in row.goals), "-")


_CASE: Column[QuantizeRow] = Column("case", lambda row: row.row.case)
_ELEMENT: Column[QuantizeRow] = Column("B/element", lambda row: _per_element(row.row))
_GOAL: Column[QuantizeRow] = Column("goal", _goal)
_MATCH: Column[QuantizeRow] = Column(
    "match", lambda row: row.row.match.upper() if row.row.match.startswith(DIFFERS) else row.row.match
)
_CUDA: tuple[Column[QuantizeRow], ...] = (
    _CASE,
    _ELEMENT,
    Column("us", lambda row: f"{row.row.times.median:.1f}"),
    Column("TB/s", lambda row: f"{row.row.tb_per_s:.2f}"),
    Column("predicted", lambda row: number(row.row.predicted_us, ".1f")),
    Column("ratio", lambda row: number(row.row.ratio)),
    _GOAL,
    Column("host us", lambda row: _median(row.row.host, ".1f")),
    Column("compile", lambda row: number(row.row.peer_ratio, ".2f", "x")),
    Column("codes", lambda row: number(row.row.peer_codes_equal, ".4%")),
    _MATCH,
)
_CPU: tuple[Column[QuantizeRow], ...] = (
    _CASE,
    _ELEMENT,
    Column("us, 1 core", lambda row: f"{row.row.times.median:.0f}"),
    Column("GB/s in", lambda row: f"{row.row.input_gb_per_s:.2f}"),
    Column("GB/s moved", lambda row: f"{1e3 * row.row.tb_per_s:.2f}"),
    _GOAL,
    Column("us, all", lambda row: number(row.row.all_cores_us, ".0f")),
    Column("host us", lambda row: _median(row.row.host, ".0f")),
    _MATCH,
)
