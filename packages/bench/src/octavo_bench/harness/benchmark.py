"""Benchmark: what one has to give, so that `perform` makes a command, tables and a result file of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, Protocol, TypeVar

from octavo_bench.errors import RunError
from octavo_bench.harness.options import Options
from octavo_bench.harness.results import Results
from octavo_bench.harness.run import Run
from octavo_bench.harness.table import Table

Asked = TypeVar("Asked", bound=Options)


class Benchmark(Protocol[Asked]):
    """One benchmark. Its docstring is the help of its command; importing its module imports no framework.

    name       of its command
    options    a dataclass whose annotated fields are the command line
    work       where `rows` are measured, as "module:function": imported when the options have been checked
    sections   the lists of rows that its result file has
    """

    name: ClassVar[str]
    options: type[Asked]
    work: ClassVar[str]
    sections: ClassVar[tuple[str, ...]] = ("rows",)

    def rows(self, run: Run[Asked]) -> Iterable[Any]:
        """Measure: rows (`results.Row`) in the order of the tables; what fails goes to `run`."""
        return rows_of(self.work, run)

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """How the rows are shown."""

    def match(self, rows: Sequence[Any]) -> Mapping[str, int]:
        """How many rows were compared with the definition, by outcome."""
        return {}

    def closing(self, results: Results) -> Iterable[str]:
        """Lines after the tables."""
        return ()

    def conclude(self, results: Results) -> None:
        """RunError where the command has failed: here, where a row did or no backend served any."""
        if results.failures:
            raise RunError(f"{len(results.failures)} rows failed; the lines with FAILED say which")
        if not any(row.row.backends for row in results.rows):
            raise RunError("no backend serves any of these layers; the notes say why, and so does `octavo why layer`")


def rows_of(work: str, run: Run[Any]) -> Iterable[Any]:
    """The rows that `work`, "module:function", measures."""
    module, _, function = work.partition(":")
    rows: Iterable[Any] = getattr(import_module(module), function)(run)
    return rows
