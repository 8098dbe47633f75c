"""`octavo bench step`: its options, rows and table. It imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from octavo_bench.errors import InputError
from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.checks import names_of
from octavo_bench.harness.goals import Goal
from octavo_bench.harness.options import FRAMEWORKS, BackendOption, SizesOption
from octavo_bench.harness.recipes import FRAMEWORK
from octavo_bench.harness.results import Results, layer_dict
from octavo_bench.harness.shapes import MODELS, SMALL, Shape
from octavo_bench.harness.table import BACKENDS, GOAL, MS, Column, Table, gain, number, rate_text, recorded_line
from octavo_bench.harness.timing import Times


@dataclass(frozen=True, kw_only=True)
class StepOptions(SizesOption, BackendOption):
    """See the command's help."""

    command: ClassVar[str] = "step"
    small: ClassVar[tuple[Shape, ...]] = SMALL
    published: ClassVar[tuple[Shape, ...]] = MODELS
    published_quick: ClassVar[tuple[Shape, ...]] = MODELS[1:3]

    framework: Annotated[str, typer.Option(help="torch, jax, or both with a comma.")] = "torch"
    sizes: Annotated[str, typer.Option(help="even, skewed (Dirichlet(0.5), one group empty), or both.")] = "even,skewed"
    reuse_weights: Annotated[
        bool, typer.Option("--reuse-weights", help="Also with weights quantized once, outside the step (torch).")
    ] = False
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also the framework's own grouped GEMM in bf16.")
    ] = True
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, even groups, few repeats: seconds.")] = False

    def check(self) -> None:
        """See `Options`; that options go together."""
        super().check()
        if self.backend is not None and len(self.chosen_frameworks) > 1:
            raise InputError(
                "--backend names backends of one framework and --framework two; leave it out, or run each alone"
            )
        if self.reuse_weights and "torch" not in self.chosen_frameworks:
            raise InputError("--reuse-weights is torch's; octavo_jax.grouped_dense quantizes its kernel in each call")

    @property
    def chosen_frameworks(self) -> tuple[str, ...]:
        """torch before JAX."""
        names = names_of("--framework", self.framework, tuple(FRAMEWORKS))
        return tuple(name for name in FRAMEWORKS if name in names)

    @property
    def rows_per_problem(self) -> int:
        """Each recipe, also with weights reused, and the framework's own, in each framework."""
        each = len(self.chosen_kinds) * (2 if self.reuse_weights else 1) + self.peers
        return each * len(self.chosen_frameworks)

    @property
    def chosen_sizes(self) -> tuple[str, ...]:
        """See `SizesOption`; in a quick run of published shapes the first."""
        chosen = super().chosen_sizes
        return chosen[:1] if self.quick and not self.shape else chosen


@dataclass(frozen=True)
class StepRow:
    """Forward and backward of one layer in one framework.

    reuse        weights were quantized once, outside the step
    backends     that serve its operations; empty for the framework's own
    over_torch   its time over that of the same step in torch, measured in turns; None where torch ran none
    quantize_ms  that its quantizers' bytes take at the copy rate; None where that is not known
    """

    section: ClassVar[str] = "rows"

    framework: str
    shape: Shape
    sizes: str
    kind: str
    reuse: bool
    backends: tuple[str, ...]
    times: Times
    over_torch: float | None = None
    quantize_ms: float | None = None

    @property
    def label(self) -> str:
        """The row's name."""
        return f"{self.kind}{', weights reused' if self.reuse else ''}"

    @property
    def tflops(self) -> float:
        """The rate of three GEMMs in this time."""
        return 3 * self.shape.tflops(self.times.median)

    def measures(self, rows: Sequence[StepRow]) -> dict[str, float]:
        """Its time, over other rows' and over the least that an emulated recipe can take; gains over bf16."""
        reached = {}
        for name, other in (("framework's bf16 / it", FRAMEWORK), ("bf16 / it", "bf16")):
            over = self._over(rows, kind=other, reuse=False)
            if over is not None:
                reached[name] = 1 / over
        if not self.backends:
            return reached
        reached["ms"] = self.times.ms
        if self.over_torch is not None:
            reached["torch"] = self.over_torch
        over_even = self._over(rows, sizes="even")
        if over_even is not None and self.sizes != "even":
            reached["even"] = over_even
        if "bf16 / it" in reached and self.quantize_ms is not None:
            reached["bf16 + bytes"] = self.times.ms / (self.times.ms * reached["bf16 / it"] + self.quantize_ms)
        return reached

    def _over(self, rows: Sequence[StepRow], **other: object) -> float | None:
        """Its time over that of the row that differs from it in these fields alone; None where there is none."""
        alike = {name: getattr(self, name) for name in ("framework", "shape", "sizes", "kind", "reuse")} | other
        same = (row for row in rows if all(getattr(row, name) == value for name, value in alike.items()))
        return next((self.times.ms / row.times.ms for row in same), None)

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        over_torch = {} if self.over_torch is None else {"over_torch": round(self.over_torch, 4)}
        own = {"framework": self.framework, "weights_reused": self.reuse, "sizes": self.sizes, **over_torch}
        return layer_dict(self, goals, **own)


class Step(Benchmark[StepOptions]):
    """A whole grouped layer, forward and backward, in each recipe.

    It is compared with the framework's own grouped layer in bf16. With both frameworks, each step in JAX is
    compared with the same step in PyTorch, in one run. Parameters and gradients are bf16, and weights are quantized
    in every step. Figures of other libraries in a goals file are quoted and labelled as recorded. The exit code is
    1 if a step fails or nothing ran. A missed goal is reported and is not a failure.
    """

    name = StepOptions.command
    options = StepOptions
    work = "octavo_bench.step.work:step_rows"

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
    gain("own / it", "framework's bf16 / it", "how many times as fast as the framework's own grouped GEMM in bf16"),
    gain("bf16 / it", "bf16 / it", "how many times as fast as Octavo's own bf16 step"),
    Column("it / torch", lambda row: number(row.row.over_torch), "its time over that of the same step in torch"),
    GOAL,
    BACKENDS,
)
