"""The report as tables in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from octavo_conformance.reports.report import COVERAGE, OUTCOMES, Report, Row, which_never_ran
from octavo_registry.cli.output import table_text

_COLUMNS = tuple(outcome for outcome in OUTCOMES if outcome != "undeclared")
_NARROWEST = 40
_MICROSECONDS = "_us"


def render(report: Report, width: int = 100) -> str:
    """One table per backend, one row per part: counts by outcome and the largest error as a share of its bound."""
    lines: list[str] = []
    measurements = report.measurements()
    for backend in dict.fromkeys(row.backend for row in report.rows):
        rows = [row for row in report.rows if row.backend == backend]
        title = f"{backend}, {report.level}, seed {report.seed}"
        lines += ["", _table(title, rows, max(width, _NARROWEST)), ""]
        for name, value in measurements.get(backend, {}).items():
            lines.append(_measured(name.removeprefix("measured."), value))
    if any(name.startswith("bound.") for row in report.rows for name in row.metrics):
        lines.append("error / bound: the largest error as a share of what is allowed; anything up to 1 is right")
    lines += [f"gap met no test that ran: {gap}" for gap in report.unused_gaps]
    lines += [f"undeclared capability: {row.reason}" for row in report.rows if row.outcome == "undeclared"]
    return "\n".join(lines).strip("\n")


def _measured(name: str, value: float) -> str:
    """A value of this machine with a unit that people read."""
    if not name.endswith(_MICROSECONDS):
        return f"{name}: {value:.3g}"
    words = name.removesuffix(_MICROSECONDS).replace("_", " ")
    return f"{words}: {value:.1f} us" if value < 1e3 else f"{words}: {value / 1e3:.1f} ms"


def _table(title: str, rows: Sequence[Row], width: int) -> str:
    cells = []
    for part in dict.fromkeys(row.part for row in rows):
        mine = [row for row in rows if row.part == part]
        counts = Counter("passed" if row.outcome == "undeclared" else row.outcome for row in mine)
        worst = [value for row in mine for name, value in row.metrics.items() if name.startswith("bound.")]
        cells.append(
            [part, *(str(counts[outcome] or "") for outcome in _COLUMNS), f"{max(worst):.3f}" if worst else ""]
        )
    return table_text(title, ("part", *_COLUMNS, "error / bound"), cells, width)


def never_ran(report: Report) -> Iterator[str]:
    """What was declared and never ran, by reason."""
    rows = [row for row in report.rows if row.part == COVERAGE]
    if not rows:
        return
    yield f"{len(rows)} declared capabilities never ran, so the run fails:"
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        what, reason = which_never_ran(row)
        by_reason.setdefault(reason, []).append(what)
    for reason, capabilities in by_reason.items():
        yield f"  {', '.join(capabilities)}: {reason}"
    yield "take off the card what is not served, serve it, or list it as a gap (--gaps)"


def skips(report: Report) -> Iterator[str]:
    """Every reason for a skip, how many tests it skipped, and one of them; the commonest first."""
    skipped = [row for row in report.rows if row.outcome == "skipped"]
    if not skipped:
        yield "nothing was skipped"
        return
    yield f"{len(skipped)} skipped, by reason:"
    for reason, count in Counter(row.reason for row in skipped).most_common():
        example = next(row.id for row in skipped if row.reason == reason)
        yield f"  {count} {'tests, such as ' if count > 1 else ''}{example}: {reason}"
