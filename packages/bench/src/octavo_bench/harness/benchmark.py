"""Benchmark: what each benchmark defines, of which `perform` makes a command, tables and a result file."""

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

    name       the name of its command
    options    a dataclass whose annotated fields are the options of the command
    work       the function that measures `rows`, as "module:function"; imported after the options have been checked
    sections   the names of the lists of rows in its result file
    """

    name: ClassVar[str]
    options: type[Asked]
    work: ClassVar[str]
    sections: ClassVar[tuple[str, ...]] = ("rows",)

    def rows(self, run: Run[Asked]) -> Iterable[Any]:
        """Measure, and return rows (`results.Row`) in the order of the tables; failures go to `run`."""
        return rows_of(self.work, run)

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """The tables that show the rows."""

    def match(self, rows: Sequence[Any]) -> Mapping[str, int]:
        """How many rows had each outcome when they were compared with the definition."""
        return {}

    def closing(self, results: Results) -> Iterable[str]:
        """Lines to print after the tables."""
        return ()

    def conclude(self, results: Results) -> None:
        """Raise RunError where the command has failed: by default where a row failed or no backend served any."""
        if results.failures:
            raise RunError(f"{len(results.failures)} rows failed; the lines with FAILED say which")
        if not any(row.row.backends for row in results.rows):
            raise RunError("no backend serves any of these layers; the notes say why, and so does `octavo why layer`")


def rows_of(work: str, run: Run[Any]) -> Iterable[Any]:
    """The rows that `work`, "module:function", measures."""
    module, _, function = work.partition(":")
    rows: Iterable[Any] = getattr(import_module(module), function)(run)
    return rows
