"""`octavo bench mlp`: its options, rows and table. It imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import typer

from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.goals import Goal
from octavo_bench.harness.options import BackendOption, ExpertShapes, SizesOption
from octavo_bench.harness.recipes import FRAMEWORK
from octavo_bench.harness.results import Results, layer_dict
from octavo_bench.harness.shapes import EXPERTS, SMALL_BLOCK, Shape
from octavo_bench.harness.table import BACKENDS, GOAL, MS, Column, Table, gain, rate_text
from octavo_bench.harness.timing import Times


@dataclass(frozen=True, kw_only=True)
class MlpOptions(SizesOption, BackendOption):
    """See the command's help. Shapes are experts' (G, K, F, M)."""

    command: ClassVar[str] = "mlp"
    small: ClassVar[tuple[Shape, ...]] = SMALL_BLOCK
    published: ClassVar[tuple[Shape, ...]] = EXPERTS
    published_quick: ClassVar[tuple[Shape, ...]] = EXPERTS[1:3]

    shape: ExpertShapes = None
    probs: Annotated[
        bool, typer.Option("--probs/--no-probs", help="Weight the rows, and compute the weights' gradient.")
    ] = True
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also on torch's own grouped GEMM in bf16.")] = True

    @property
    def rows_per_problem(self) -> int:
        """Each recipe both ways, and torch's own."""
        return 2 * len(self.chosen_kinds) + self.peers


Way = Literal["fused", "in a row"]
FUSED: Way = "fused"
IN_A_ROW: Way = "in a row"
WAYS: tuple[Way, Way] = (IN_A_ROW, FUSED)


@dataclass(frozen=True)
class MlpRow:
    """Forward and backward of the experts (G, K, F, M) with SwiGLU: [2F, K] and [K, F] per expert.

    way        `grouped_mlp`, or the operations in a row
    backends   that serve the two layers; empty for torch's own
    fused      what `grouped_mlp`'s plan says of the operations between the layers
    """

    section: ClassVar[str] = "rows"

    shape: Shape
    sizes: str
    kind: str
    way: Way
    backends: tuple[str, ...]
    fused: str
    times: Times

    @property
    def tflops(self) -> float:
        """The rate of the nine products of [M, K] and [F, K] in this time."""
        return 9 * self.shape.tflops(self.times.median)

    def measures(self, rows: Sequence[MlpRow]) -> dict[str, float]:
        """How many times as fast as the same recipe in a row, where it is fused, and as torch's own bf16."""
        reached = {}
        for row in rows:
            if (row.shape, row.sizes, row.way) != (self.shape, self.sizes, IN_A_ROW):
                continue
            if self.way == FUSED and row.kind == self.kind:
                reached["in a row"] = row.times.ms / self.times.ms
            if row.kind == FRAMEWORK != self.kind:
                reached["torch's bf16"] = row.times.ms / self.times.ms
        return reached

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return layer_dict(self, goals, way=self.way, sizes=self.sizes, fused=self.fused)


class Mlp(Benchmark[MlpOptions]):
    """Expert MLPs in PyTorch, fused and as separate operations.

    `grouped_mlp` with SwiGLU, forward and backward, is compared with `grouped_linear`, `silu(gate) * up * probs` as
    torch runs it, and `grouped_linear`. Parameters and gradients are bf16, and weights are quantized in every step.
    The exit code is 1 if a row fails or nothing ran. A missed goal is reported and is not a failure.
    """

    name = MlpOptions.command
    options = MlpOptions
    work = "octavo_bench.mlp.torch:mlp_rows"

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
    gain("in a row / it", "in a row", "how many times as fast as the same operations one after another"),
    gain("torch's bf16 / it", "torch's bf16", "how many times as fast as torch's own grouped GEMM in bf16"),
    GOAL,
    BACKENDS,
)
