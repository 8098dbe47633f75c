"""Tables of results on the terminal, as columns that each benchmark declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

from octavo_bench.harness.goals import verdict
from octavo_bench.harness.results import Judged, Results, Row
from octavo_bench.harness.timing import Times
from octavo_registry.cli.output import print_line, print_table

R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A column: what stands above it, its cell of a row, and where the heading needs it what it means."""

    header: str
    cell: Callable[[Judged[R]], str]
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Table(Generic[R]):
    """How rows of one kind are shown: consecutive rows with one title stand in one table.

    below   lines under a table
    """

    kind: type[R]
    title: Callable[[R], str]
    columns: Sequence[Column[R]]
    below: Callable[[Sequence[Judged[R]]], Iterable[str]] = lambda rows: ()


SPREAD = "the median, and the tenth to the ninetieth percentile"

GOAL: Column[Any] = Column("goal", lambda row: verdict(row.goals))
BACKENDS: Column[Any] = Column("backends", lambda row: ", ".join(row.row.backends) or "-")


def spread(times: Times | None, *, milliseconds: bool = True) -> str:
    """A cell of times: the median, and in brackets the tenth to the ninetieth percentile."""
    if times is None:
        return "-"
    scale, digits = (1e3, 3) if milliseconds else (1.0, 1)
    median, low, high = (f"{value / scale:.{digits}f}" for value in (times.median, times.low, times.high))
    return f"{median} (one call)" if times.low == times.high else f"{median} ({low}-{high})"


MS: Column[Any] = Column("ms (10-90 %)", lambda row: spread(row.row.times), f"{SPREAD} of the calls, in milliseconds")


def number(value: float | None, form: str = ".3f", suffix: str = "") -> str:
    """A cell of a number that may be missing."""
    return "-" if value is None else f"{value:{form}}{suffix}"


def rate_text(tflops: float) -> str:
    """TFLOP/s for a table; a CPU's need their digits."""
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.3g}" if tflops >= 1e-3 else "<0.001"


def gain(header: str, measure: str, meaning: str = "") -> Column[Any]:
    """A column of a measure that says how many times as fast a row is."""
    return Column(header, lambda row: number(row.measures.get(measure), ".2f", "x"), meaning)


def share(header: str, measure: str, meaning: str = "") -> Column[Any]:
    """A column of a measure with three digits."""
    return Column(header, lambda row: number(row.measures.get(measure)), meaning)


def print_results(results: Results, tables: Iterable[Table[Any]], closing: Iterable[str]) -> None:
    """Every table with what is recorded of its shape, the closing lines, then notes, failures and the verdict."""
    for table in tables:
        for title, group in groupby(results.of(table.kind), key=lambda row: table.title(row.row)):
            rows = list(group)
            cells = [[column.cell(row) for column in table.columns] for row in rows]
            print_table(title, [column.header for column in table.columns], cells)
            for line in table.below(rows):
                print_line(line)
            print_line()
        if results.of(table.kind):
            for line in legend(table):
                print_line(line)
            print_line()
    for line in about_cpu(results):
        print_line(line)
    for line in closing:
        print_line(line)
    for note in results.notes:
        print_line(f"note: {note}")
    for failure in results.failures:
        print_line(f"FAILED: {failure.case}, {failure.shape}, {failure.grouping}: {failure.error}")
    print_line(f"{_reached(results)}; seed {results.facts.seed}; {results.facts.seconds:.0f} s.")


def legend(table: Table[Any]) -> Iterable[str]:
    """What the headings of a table mean, those that do not say it themselves."""
    meant = {column.header: column.meaning for column in table.columns if column.meaning}
    width = max(map(len, meant), default=0)
    return [f"  {header:<{width}}  {meaning}" for header, meaning in meant.items()]


def about_cpu(results: Results) -> Iterable[str]:
    """On a CPU: that its times are no GPU's, and that reference backends are there to be right where one served."""
    if results.facts.device != "cpu":
        return
    served = {name for row in results.rows for name in _backends(row.row)}
    slow = sorted(name for name in served if name.endswith("-reference"))
    if slow:
        yield (
            f"{' and '.join(slow)} {'is' if len(slow) == 1 else 'are'} made to be right, not to be fast: on this CPU "
            "these times say nothing about a GPU. Native backends have kernels of their own."
        )
    else:
        yield "These are times of a CPU and say nothing about a GPU."
    if results.facts.repeats == 1:
        yield "Each row is a single call, so ratios mean little: give a larger --repeats."
    yield ""


def _backends(row: Any) -> Sequence[str]:
    single = getattr(row, "backend", None)
    return (single,) if isinstance(single, str) else getattr(row, "backends", ())


def _reached(results: Results) -> str:
    if results.goals:
        return f"Goals reached: {sum(goal.passed for goal in results.goals)} of {len(results.goals)}"
    return "No goals on this device or at these shapes" if results.judged else "No goals: --goals FILE gives some"


def recorded_line(results: Results, rows: Sequence[Judged[R]]) -> Iterable[str]:
    """Figures of other libraries at the shape of these rows."""
    shape = rows[0].row.shape
    known = {} if shape is None else results.recorded_at(shape)
    if known:
        label, _ = results.recorded_as
        figures = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in known.items())
        yield f"  {label}: {figures}"
