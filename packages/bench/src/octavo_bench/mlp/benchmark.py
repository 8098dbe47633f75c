"""`octavo bench mlp`: its table. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.results import Results
from octavo_bench.harness.run import Run
from octavo_bench.harness.table import BACKENDS, GOAL, MS, Column, Table, gain, rate_text
from octavo_bench.mlp.options import MlpOptions
from octavo_bench.mlp.row import MlpRow


class Mlp(Benchmark[MlpOptions]):
    """Expert MLPs with SwiGLU in torch, forward and backward: `grouped_mlp` beside the same operations in a row.

    Those are `grouped_linear`, `silu(gate) * up * probs` as torch runs it, and `grouped_linear`. bf16 parameters and
    gradients, weights quantized every step. Exit code 1 where a row fails or nothing ran; a goal that is missed is
    reported and no failure.
    """

    name = MlpOptions.command
    options = MlpOptions

    def rows(self, run: Run[MlpOptions]) -> Iterable[MlpRow]:
        """See `Benchmark`."""
        from octavo_bench.mlp.torch import mlp_rows

        return mlp_rows(run)

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """A table per shape and vector of sizes."""
        weighted = "weighted rows" if results.parts["probs"] else "rows without weights"

        def title(row: MlpRow) -> str:
            what = f"forward + backward in torch, {weighted}"
            return f"{row.shape.name} experts G,K,F,M {row.shape.key}, {row.sizes}: {what}"

        yield Table(MlpRow, title, _COLUMNS)

    def closing(self, results: Results) -> Iterable[str]:
        """What was fused."""
        return dict.fromkeys(f"{row.row.kind}: {row.row.fused}" for row in results.rows if row.row.fused)


_COLUMNS: tuple[Column[MlpRow], ...] = (
    Column("recipe", lambda row: row.row.kind),
    Column("way", lambda row: row.row.way),
    MS,
    Column("TFLOP/s", lambda row: rate_text(row.row.tflops)),
    gain("in a row / it", "in a row"),
    gain("torch's bf16 / it", "torch's bf16"),
    GOAL,
    BACKENDS,
)
