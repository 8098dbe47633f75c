"""`octavo bench moe`: its table. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.results import Results
from octavo_bench.harness.run import Run
from octavo_bench.harness.table import BACKENDS, GOAL, MS, Column, Table, gain, rate_text
from octavo_bench.moe.options import MoeOptions
from octavo_bench.moe.row import MoeRow


class Moe(Benchmark[MoeOptions]):
    """A MoE layer in torch, forward and backward: router, `permute`, `grouped_mlp` with SwiGLU, `unpermute`.

    Beside it the same on torch's bf16 `_grouped_mm`, in two ways of putting a token's rows together; the faster one
    counts. Every expert gets the same number of tokens. bf16 parameters and gradients, weights quantized every step.
    Exit code 1 where a row fails or nothing ran; a goal that is missed is reported and no failure.
    """

    name = MoeOptions.command
    options = MoeOptions

    def rows(self, run: Run[MoeOptions]) -> Iterable[MoeRow]:
        """See `Benchmark`."""
        from octavo_bench.moe.torch import moe_rows

        return moe_rows(run)

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """A table per shape."""

        def title(row: MoeRow) -> str:
            what = "a MoE layer forward + backward in torch"
            return f"{row.shape.name} experts G,K,F,M {row.shape.key}, {row.choices} per token: {what}"

        yield Table(MoeRow, title, _COLUMNS)


_COLUMNS: tuple[Column[MoeRow], ...] = (
    Column("recipe", lambda row: row.row.kind),
    MS,
    Column("TFLOP/s", lambda row: rate_text(row.row.tflops)),
    gain("torch's bf16 / it", "torch's bf16"),
    GOAL,
    BACKENDS,
)
