"""`octavo bench step`: its table. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.results import Results
from octavo_bench.harness.run import Run
from octavo_bench.harness.table import BACKENDS, GOAL, MS, Column, Table, gain, number, rate_text, recorded_line
from octavo_bench.step.options import StepOptions
from octavo_bench.step.row import StepRow


class Step(Benchmark[StepOptions]):
    """A whole grouped linear layer, forward and backward, in each recipe, beside the framework's own bf16.

    With both frameworks each step in JAX is held to the same one in torch, in one run. bf16 parameters, gradients in
    bf16, weights quantized every step. Figures of other libraries in a goals file are quoted, labelled as recorded.
    Exit code 1 where a step fails or nothing ran; a goal that is missed is reported and no failure.
    """

    name = StepOptions.command
    options = StepOptions

    def rows(self, run: Run[StepOptions]) -> Iterable[StepRow]:
        """See `Benchmark`."""
        from octavo_bench.step.work import step_rows

        return step_rows(run)

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """A table per shape and vector of sizes; what is recorded is of even groups."""
        frameworks = " and ".join(results.parts["frameworks"])
        yield Table(
            StepRow,
            lambda row: f"{row.shape.label}, {row.sizes}: forward + backward in {frameworks}",
            _COLUMNS,
            lambda rows: recorded_line(results, rows) if rows[0].row.sizes == "even" else (),
        )


_COLUMNS: tuple[Column[StepRow], ...] = (
    Column("recipe", lambda row: row.row.label),
    Column("in", lambda row: row.row.framework),
    MS,
    Column("TFLOP/s", lambda row: rate_text(row.row.tflops)),
    gain("own / it", "framework's bf16 / it"),
    gain("bf16 / it", "bf16 / it"),
    Column("it / torch", lambda row: number(row.row.over_torch)),
    GOAL,
    BACKENDS,
)
