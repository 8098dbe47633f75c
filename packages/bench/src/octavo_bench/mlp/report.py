"""The tables of `octavo bench mlp` on the terminal."""

from __future__ import annotations

from itertools import groupby

from octavo_bench.harness.goals import rate_text, verdict
from octavo_bench.harness.table import print_end, print_failures
from octavo_bench.mlp.row import FUSED, IN_A_ROW, MlpResults, MlpRow, beside
from octavo_bench.step.row import PEER
from octavo_registry.cli.output import print_line, print_table

_HEADER = ("recipe", "way", "ms", "TFLOP/s", "in a row / it", "torch's bf16 / it", "goal", "backends")


def print_results(results: MlpResults) -> None:
    """A table a shape and vector of sizes, then what was fused, notes and what did not work."""
    for (shape, sizes), group in groupby(results.rows, key=lambda row: (row.shape, row.sizes)):
        weighted = "weighted rows" if results.probs else "rows without weights"
        title = f"{shape.name} experts G,K,F,M {shape.key}, {sizes}: forward + backward in torch, {weighted}"
        print_table(title, _HEADER, [_cells(row, results) for row in group])
        print_line()
    for line in dict.fromkeys(f"{row.kind}: {row.fused}" for row in results.rows if row.fused):
        print_line(line)
    for note in results.notes:
        print_line(f"note: {note}")
    print_failures(results.failures)
    judged = [goal.passed for row in results.rows for goal in row.goals]
    print_end(results, judged, "Goals reached", "No goals on this device")


def _cells(row: MlpRow, results: MlpResults) -> list[str]:
    plain = beside(row, results.rows, row.kind, IN_A_ROW) if row.way == FUSED else None
    own = beside(row, results.rows, PEER, IN_A_ROW) if row.kind != PEER else None
    return [
        row.kind,
        row.way,
        f"{row.ms:.3f}",
        rate_text(row.tflops),
        "-" if plain is None else f"{plain / row.ms:.2f}x",
        "-" if own is None else f"{own / row.ms:.2f}x",
        verdict(row.goals),
        ", ".join(row.backends) or "-",
    ]
