"""The tables of `octavo bench step` on the terminal."""

from __future__ import annotations

from itertools import groupby

from octavo_cli.bench.goals import rate_text, verdict
from octavo_cli.bench.recorded import LABEL
from octavo_cli.bench.report import print_end, print_failures
from octavo_cli.bench.step_results import PEER, StepResults, StepRow, recorded_ms
from octavo_registry.cli.output import print_line, print_table

_HEADER = ("recipe", "ms", "TFLOP/s", "own / it", "bf16 / it", "goal", "backends")


def print_results(results: StepResults) -> None:
    """A table a shape and vector of sizes, then notes and what did not work."""
    for (shape, sizes), group in groupby(results.rows, key=lambda row: (row.shape, row.sizes)):
        rows = list(group)
        table = [_cells(row, rows) for row in rows]
        print_table(f"{shape.label}, {sizes}: forward + backward in {results.framework}", _HEADER, table)
        known = recorded_ms(shape)
        if known and sizes == "even":
            figures = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in known.items())
            print_line(f"  ms {LABEL}: {figures}")
        print_line()
    for note in results.notes:
        print_line(f"note: {note}")
    print_failures(results.failures)
    judged = [goal.passed for row in results.rows for goal in row.goals]
    print_end(results, judged, "Goals reached", "No goals on this device")


def _cells(row: StepRow, rows: list[StepRow]) -> list[str]:
    return [
        row.label,
        f"{row.ms:.3f}",
        rate_text(row.tflops),
        _gain(row, rows, PEER),
        _gain(row, rows, "bf16"),
        verdict(row.goals),
        ", ".join(row.backends) or "-",
    ]


def _gain(row: StepRow, rows: list[StepRow], kind: str) -> str:
    """The time of the step of `kind` over this one's."""
    base = next((one.ms for one in rows if one.kind == kind and not one.reuse), None)
    return "-" if base is None else f"{base / row.ms:.2f}x"
