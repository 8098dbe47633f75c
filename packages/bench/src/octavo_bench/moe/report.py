"""The tables of `octavo bench moe` on the terminal."""

from __future__ import annotations

from itertools import groupby

from octavo_bench.harness.goals import rate_text, verdict
from octavo_bench.harness.table import print_end, print_failures
from octavo_bench.moe.row import PEERS, MoeResults, MoeRow, own_ms
from octavo_registry.cli.output import print_line, print_table

_HEADER = ("recipe", "ms", "TFLOP/s", "torch's bf16 / it", "goal", "backends")


def print_results(results: MoeResults) -> None:
    """A table a shape, then notes and what did not work."""
    for (shape, choices), group in groupby(results.rows, key=lambda row: (row.shape, row.choices)):
        title = f"{shape.name} experts G,K,F,M {shape.key}, {choices} a token: a MoE layer forward + backward in torch"
        print_table(title, _HEADER, [_cells(row, results) for row in group])
        print_line()
    for note in results.notes:
        print_line(f"note: {note}")
    print_failures(results.failures)
    judged = [goal.passed for row in results.rows for goal in row.goals]
    print_end(results, judged, "Goals reached", "No goals on this device or at these shapes")


def _cells(row: MoeRow, results: MoeResults) -> list[str]:
    own = None if row.kind in PEERS else own_ms(row, results.rows)
    return [
        row.kind,
        f"{row.ms:.3f}",
        rate_text(row.tflops),
        "-" if own is None else f"{own / row.ms:.2f}x",
        verdict(row.goals),
        ", ".join(row.backends) or "-",
    ]
