"""`octavo bench ep`: its tables and its verdict. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from octavo_bench.ep.options import EpOptions
from octavo_bench.ep.row import EpRow, Gathered
from octavo_bench.errors import RunError
from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.results import Results
from octavo_bench.harness.run import Run
from octavo_bench.harness.table import BACKENDS, GOAL, MS, Column, Table, number, share


class Ep(Benchmark[EpOptions]):
    """A MoE block in JAX, forward and backward, on one device and with its experts spread over several.

    Strong scaling: the same experts and tokens on all of them, tokens sent as they are and, where the recipe scales row
    by row, as its codes. Also what a device receives for it, and what it gathers of a kernel that FSDP shards, both
    counted in the compiled programs and, on GPUs, by their NVLink counters: nothing else may run on them. bf16
    parameters and gradients, weights quantized every step. Exit code 1 where a row fails, drops choices, or nothing
    ran; a goal that is missed is reported and no failure.
    """

    name = EpOptions.command
    options = EpOptions
    sections: ClassVar[tuple[str, ...]] = ("rows", "gathered")

    def rows(self, run: Run[EpOptions]) -> Iterable[EpRow | Gathered]:
        """See `Benchmark`."""
        from octavo_bench.ep.work import ep_rows

        return ep_rows(run)

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """Blocks by shape, then what FSDP gathers."""

        def title(row: EpRow) -> str:
            what = f"{results.parts['choices']} choices per token: forward + backward in JAX"
            return f"{row.shape.name} MoE block G,K,F,M {row.shape.key}, {what}"

        def kernel(row: Gathered) -> str:
            sides = [row.shape.groups, row.shape.k, 2 * row.shape.n]
            return f"{row.shape.name} kernel {sides} cut by FSDP: gathered in a step"

        yield Table(EpRow, title, _BLOCKS)
        yield Table(Gathered, kernel, _GATHERED)

    def conclude(self, results: Results) -> None:
        """RunError also where choices were dropped."""
        super().conclude(results)
        for row in (row.row for row in results.of(EpRow) if row.row.dropped):
            slack = results.parts["slack"]
            raise RunError(f"{row.dropped} choices found no row with {row.way}; give more --slack than {slack}")


def _megabytes(count: int | None) -> str:
    return number(None if count is None else count / 1e6, ".1f")


_BLOCKS: tuple[Column[EpRow], ...] = (
    Column("recipe", lambda row: row.row.kind),
    Column("devices", lambda row: str(row.row.devices)),
    Column("way", lambda row: row.row.way or "-"),
    Column("tokens as", lambda row: "codes" if row.row.payload else "bf16"),
    MS,
    Column("over one", lambda row: number(row.measures.get("over one"), ".2f")),
    Column("MB received", lambda row: _megabytes(row.row.received)),
    Column("by NVLink", lambda row: _megabytes(row.row.nvlink)),
    Column("dropped", lambda row: str(row.row.dropped)),
    GOAL,
    BACKENDS,
)
_GATHERED: tuple[Column[Gathered], ...] = (
    Column("recipe", lambda row: row.row.kind),
    Column("devices", lambda row: str(row.row.devices)),
    Column("MB gathered", lambda row: _megabytes(row.row.bytes)),
    share("of bf16's", "bf16's bytes"),
    Column("by NVLink", lambda row: _megabytes(row.row.nvlink)),
    share("of bf16's", "bf16's bytes over NVLink"),
    GOAL,
)
