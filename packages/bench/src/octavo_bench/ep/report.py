"""The tables of `octavo bench ep` on the terminal."""

from __future__ import annotations

from itertools import groupby

from octavo_bench.ep.row import EpResults, EpRow, Gathered, gathered_plain, speedup
from octavo_bench.harness.goals import verdict
from octavo_bench.harness.table import print_end, print_failures
from octavo_registry.cli.output import print_line, print_table

_HEADER = (
    "recipe",
    "devices",
    "way",
    "tokens as",
    "ms",
    "over one",
    "MB received",
    "by NVLink",
    "dropped",
    "goal",
    "backends",
)
_GATHERED = ("recipe", "devices", "MB gathered", "of bf16's", "by NVLink", "of bf16's", "goal")


def print_results(results: EpResults) -> None:
    """A table a shape, then what FSDP gathers, notes and what did not work."""
    for shape, group in groupby(results.rows, key=lambda row: row.shape):
        title = f"{shape.name} MoE block G,K,F,M {shape.key}, {results.k} choices a token: forward + backward in JAX"
        print_table(title, _HEADER, [_cells(row, results) for row in group])
        print_line()
    for shape, kernels in groupby(results.gathered, key=lambda row: row.shape):
        title = f"{shape.name} kernel [{shape.groups}, {shape.k}, {2 * shape.n}] cut by FSDP: gathered in a step"
        print_table(title, _GATHERED, [_gathered_cells(row, results) for row in kernels])
        print_line()
    for note in results.notes:
        print_line(f"note: {note}")
    print_failures(results.failures)
    print_end(results, results.judged, "Goals reached", "No goals here: they are of 4 GPUs")


def _cells(row: EpRow, results: EpResults) -> tuple[str, ...]:
    factor = speedup(row, results.rows)
    return (
        row.kind,
        str(row.devices),
        row.way or "-",
        "codes" if row.payload else "bf16",
        f"{row.ms:.3f}",
        "-" if factor is None or row.devices == 1 else f"{factor:.2f}",
        f"{row.received / 1e6:.1f}",
        _megabytes(row.nvlink),
        str(row.dropped),
        verdict(row.goals),
        ", ".join(row.backends),
    )


def _gathered_cells(row: Gathered, results: EpResults) -> tuple[str, ...]:
    plain = gathered_plain(row, results.gathered)
    return (
        row.kind,
        str(row.devices),
        f"{row.bytes / 1e6:.1f}",
        _share(row.bytes, None if plain is None else plain.bytes),
        _megabytes(row.nvlink),
        _share(row.nvlink, None if plain is None else plain.nvlink),
        verdict(row.goals),
    )


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.1f}"


def _share(count: int | None, of: int | None) -> str:
    return "-" if count is None or not of else f"{count / of:.3f}"
