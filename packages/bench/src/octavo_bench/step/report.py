"""The tables of `octavo bench step` on the terminal."""

from __future__ import annotations

from itertools import groupby

from octavo_bench.harness.goals import rate_text, verdict
from octavo_bench.harness.recorded import LABEL
from octavo_bench.harness.table import print_end, print_failures
from octavo_bench.step.row import PEER, StepResults, StepRow, ratio, recorded_ms
from octavo_registry.cli.output import print_line, print_table

_HEADER = ("recipe", "in", "ms", "TFLOP/s", "own / it", "bf16 / it", "it / torch", "goal", "backends")


def print_results(results: StepResults) -> None:
    """A table a shape and vector of sizes, then notes and what did not work."""
    for (shape, sizes), group in groupby(results.rows, key=lambda row: (row.shape, row.sizes)):
        rows = list(group)
        table = [_cells(row, results) for row in rows]
        title = f"{shape.label}, {sizes}: forward + backward in {' and '.join(results.frameworks)}"
        print_table(title, _HEADER, table)
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


def _cells(row: StepRow, results: StepResults) -> list[str]:
    return [
        row.label,
        row.framework,
        f"{row.ms:.3f}",
        rate_text(row.tflops),
        _gain(row, results, PEER),
        _gain(row, results, "bf16"),
        "-" if row.over_torch is None else f"{row.over_torch:.3f}",
        verdict(row.goals),
        ", ".join(row.backends) or "-",
    ]


def _gain(row: StepRow, results: StepResults, kind: str) -> str:
    """The time of the step of `kind` over this one's."""
    over = ratio(row, results.rows, kind=kind, reuse=False)
    return "-" if over is None else f"{1 / over:.2f}x"
