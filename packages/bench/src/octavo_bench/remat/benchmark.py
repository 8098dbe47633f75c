"""`octavo bench remat`: its table. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.results import Results
from octavo_bench.harness.run import Run
from octavo_bench.harness.table import GOAL, MS, Column, Table, gain, number
from octavo_bench.remat.options import RematOptions
from octavo_bench.remat.row import PEER, RematRow


class Remat(Benchmark[RematOptions]):
    """A block of expert layers in JAX under `jax.checkpoint`: its time, memory, runs and compilation by policy.

    Plain remat quantizes x and the kernels twice; `octavo_jax.policies.save_quantized` keeps them. Exit code 1 where
    a row fails or nothing ran; a goal that is missed is reported and no failure.
    """

    name = RematOptions.command
    options = RematOptions

    def rows(self, run: Run[RematOptions]) -> Iterable[RematRow]:
        """See `Benchmark`."""
        from octavo_bench.remat.work import remat_rows

        return remat_rows(run)

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """A table per shape and vector of sizes."""
        layers = f"{results.parts['layers']} layers{', unrolled' if results.parts['unrolled'] else ''}"

        def title(row: RematRow) -> str:
            return f"experts of {row.shape.label}, {row.sizes}, {layers}: forward + backward in jax"

        yield Table(RematRow, title, _COLUMNS)


_COLUMNS: tuple[Column[RematRow], ...] = (
    Column("recipe", lambda row: row.row.kind),
    Column("policy", lambda row: row.row.policy),
    MS,
    gain("remat / it", "plain remat"),
    gain("ragged_dot / it", PEER),
    Column("quantize", lambda row: str(row.row.quantize)),
    Column("fprop", lambda row: str(row.row.fprop)),
    Column(
        "temporary GB",
        lambda row: number(None if row.row.temporary_bytes is None else row.row.temporary_bytes / 1e9, ".2f"),
    ),
    Column("compile s", lambda row: f"{row.row.trace_s:.1f} + {row.row.compile_s:.1f}"),
    GOAL,
)
