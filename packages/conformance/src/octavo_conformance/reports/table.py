"""The report as tables in the terminal."""

from __future__ import annotations

import io
from collections import Counter

from octavo_conformance.reports.report import OUTCOMES, Report, Row

_STYLES = {"passed": "green", "failed": "red", "undeclared": "yellow", "gap": "yellow", "skipped": "dim"}
_COLUMNS = tuple(outcome for outcome in OUTCOMES if outcome != "undeclared")


def render(report: Report, width: int = 100) -> str:
    """One table per backend, one row per part: counts by outcome and the largest error as a share of its bound."""
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=min(width, 120), highlight=False)
    measurements = report.measurements()
    for backend in dict.fromkeys(row.backend for row in report.rows):
        rows = [row for row in report.rows if row.backend == backend]
        console.print(_table(f"{backend}, {report.level}, seed {report.seed}", rows))
        for name, value in measurements.get(backend, {}).items():
            console.print(f"{name.removeprefix('measured.')}: {value:.3g}")
    for gap in report.unused_gaps:
        console.print(f"gap met no test that ran: {gap}")
    for row in report.rows:
        if row.outcome == "undeclared":
            console.print(f"undeclared capability: {row.reason}")
    return text.getvalue().rstrip()


def _table(title: str, rows: list[Row]) -> object:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("part", no_wrap=True)
    for outcome in _COLUMNS:
        table.add_column(outcome, justify="right", no_wrap=True)
    table.add_column("error / bound", justify="right", no_wrap=True)
    for part in dict.fromkeys(row.part for row in rows):
        mine = [row for row in rows if row.part == part]
        counts = Counter("passed" if row.outcome == "undeclared" else row.outcome for row in mine)
        worst = [value for row in mine for name, value in row.metrics.items() if name.startswith("bound.")]
        cells = [f"[{_STYLES[outcome]}]{counts[outcome]}[/]" if counts[outcome] else "" for outcome in _COLUMNS]
        table.add_row(part, *cells, f"{max(worst):.3f}" if worst else "")
    return table
