"""`octavo bench moe`: its options, rows and table. It imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from octavo_bench.errors import InputError
from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.goals import Goal
from octavo_bench.harness.options import BackendOption, ExpertShapes, TokenChoices
from octavo_bench.harness.results import Results, layer_dict
from octavo_bench.harness.shapes import EXPERTS, SMALL_BLOCK, Shape
from octavo_bench.harness.table import BACKENDS, GOAL, MS, Column, Table, gain, rate_text
from octavo_bench.harness.timing import Times


@dataclass(frozen=True, kw_only=True)
class MoeOptions(BackendOption):
    """See the command's help. Shapes are experts' (G, K, F, M)."""

    command: ClassVar[str] = "moe"
    small: ClassVar[tuple[Shape, ...]] = SMALL_BLOCK
    published: ClassVar[tuple[Shape, ...]] = EXPERTS
    published_quick: ClassVar[tuple[Shape, ...]] = EXPERTS[1:2]

    shape: ExpertShapes = None
    choices: TokenChoices = None
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also torch's own GEMM, and SonicMoE.")] = True
    quick: Annotated[bool, typer.Option("--quick", help="DeepSeek-V3's alone, few repeats: seconds.")] = False

    @property
    def chosen_choices(self) -> int:
        """Experts per token; `InputError` where a shape cannot be dealt out evenly."""
        choices = self.choices
        if choices is None:
            choices = 2 if self.chosen_device == "cpu" else 8
        for shape in self.chosen_shapes:
            if not 1 <= choices <= shape.groups or shape.rows % choices or shape.rows % shape.groups:
                raise InputError(
                    f"--choices is {choices} and the experts are {shape.key}; give 1 to {shape.groups}, and M a "
                    "multiple of it and of G"
                )
        return choices


ADDED = "torch's bf16, index_add"
GATHERED = "torch's bf16, gathered and summed"
TORCHS = (ADDED, GATHERED)
"""The kinds of torch's own grouped GEMM, by how the rows of a token are put together again."""

SONIC = "SonicMoE's bf16"
PEERS = (*TORCHS, SONIC)
"""The kinds of other libraries' layers."""


@dataclass(frozen=True)
class MoeRow:
    """Forward and backward of a layer with experts (G, K, F, M): routing, permutation, SwiGLU experts, and back.

    choices    of each of the M / choices tokens
    backends   that serve the experts; empty for peers
    match      how far its gradients are from `GATHERED`'s, the farthest of x, w1 and w2 by norm; "" where that is not
               there
    """

    section: ClassVar[str] = "rows"

    shape: Shape
    choices: int
    kind: str
    backends: tuple[str, ...]
    times: Times
    match: str = ""

    @property
    def tflops(self) -> float:
        """The rate of the nine products of [M, K] and [F, K] in this time."""
        return 9 * self.shape.tflops(self.times.median)

    def measures(self, rows: Sequence[MoeRow]) -> dict[str, float]:
        """How many times as fast as torch's faster way, and as SonicMoE's layer, at the same shape."""
        if self.kind in PEERS:
            return {}
        beside = [row for row in rows if (row.shape, row.choices) == (self.shape, self.choices)]
        times = {
            measure: [row.times.ms for row in beside if row.kind in kinds]
            for measure, kinds in (("torch's bf16", TORCHS), (SONIC, (SONIC,)))
        }
        return {measure: min(theirs) / self.times.ms for measure, theirs in times.items() if theirs}

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        return layer_dict(self, goals, choices=self.choices) | {"match": self.match}


class Moe(Benchmark[MoeOptions]):
    """A MoE layer in PyTorch, from the router to combined tokens.

    The router, `permute`, `grouped_mlp` with SwiGLU and `unpermute`, forward and backward, are timed alternately
    with the same layer on torch's bf16 `_grouped_mm`, which puts a token's rows together in two ways, of which the
    faster one counts, and with SonicMoE's layer where it is installed. Every expert gets the same number of tokens.
    Parameters and gradients are bf16, and weights are quantized in every step. The exit code is 1 if a row fails or
    nothing ran. A missed goal is reported and is not a failure.
    """

    name = MoeOptions.command
    options = MoeOptions
    work = "octavo_bench.moe.work:moe_rows"

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
    gain("torch's bf16 / it", "torch's bf16", "how many times as fast as torch's faster way in bf16"),
    gain("SonicMoE / it", SONIC, "how many times as fast as SonicMoE's layer in bf16, where it is installed"),
    GOAL,
    BACKENDS,
    Column("match", lambda row: row.row.match or "-", "how far its gradients are from those of torch's way, by norm"),
)
