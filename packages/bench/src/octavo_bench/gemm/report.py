"""The tables of `octavo bench gemm` on the terminal."""

from __future__ import annotations

from collections import Counter

from octavo_bench.gemm.advice import wasted_rows
from octavo_bench.gemm.row import GemmResults, GemmRow, Table
from octavo_bench.harness.goals import rate_text, verdict
from octavo_bench.harness.recorded import DEEPGEMM_TFLOPS, LABEL
from octavo_bench.harness.table import print_end, print_failures
from octavo_registry.cli.output import print_line, print_table

_HEADER = ("case", "gemm", "us", "TFLOP/s", "of grouped", "of dense", "goal", "backend", "match")


def print_results(results: GemmResults) -> None:
    """A table a shape and vector of sizes with its peers under it, then advice, notes and what did not work."""
    for table in results.tables:
        print_table(f"{table.label}; {wasted_rows(table)}", _HEADER, [_cells(row) for row in table.rows])
        for line in _peer_lines(table):
            print_line(line)
        print_line()
    for line in results.advice:
        print_line(line)
    for note, count in Counter(note for table in results.tables for note in table.notes).items():
        print_line(f"note, {count} tables: {note}")
    print_failures(results.failures)
    judged = [goal.passed for row in results.rows for goal in row.goals]
    print_end(results, judged, "Goals reached", "No goals on this device")


def _cells(row: GemmRow) -> list[str]:
    return [
        row.case.label,
        row.case.gemm,
        f"{row.times.median:.1f}",
        rate_text(row.tflops),
        _ratio(row, "grouped", "ragged"),
        _ratio(row, "dense"),
        verdict(row.goals),
        row.backend,
        row.match.upper() if row.match.startswith("differs") else row.match,
    ]


def _ratio(row: GemmRow, *names: str) -> str:
    """Our rate over that of the closest peer whose name holds one of these."""
    for peer, ratio in row.ratios.items():
        if any(name in peer for name in names):
            return f"{ratio:.3f}"
    return "-"


def _peer_lines(table: Table) -> list[str]:
    rates: dict[str, list[str]] = {}
    for peer in table.peers:
        if peer.tflops is not None:
            gemm = "" if peer.gemm == "dense" else f"{peer.gemm} "
            rates.setdefault(peer.name, []).append(f"{gemm}{rate_text(peer.tflops)}")
    lines = []
    if rates:
        lines.append("  peers, TFLOP/s: " + "; ".join(f"{name} {', '.join(found)}" for name, found in rates.items()))
    known = DEEPGEMM_TFLOPS.get(table.shape.key)
    if known is not None:
        lines.append(
            f"  DeepGEMM, {LABEL}: block fprop {known.fprop_block:.0f}, bf16 fprop {known.fprop_bf16:.0f}, FP8 wgrad "
            f"into fp32 {known.wgrad_fp8_accumulate:.0f}, bf16 wgrad {known.wgrad_bf16:.0f}"
        )
    return lines
