"""`octavo bench remat`: its options, rows and table. It imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.checks import check_counts
from octavo_bench.harness.goals import Goal
from octavo_bench.harness.options import BackendOption, ExpertShapes, SizesOption, SomeKinds
from octavo_bench.harness.results import Results, layer_dict
from octavo_bench.harness.shapes import EXPERTS, SMALL_BLOCK, Shape
from octavo_bench.harness.table import GOAL, MS, Column, Table, gain, number
from octavo_bench.harness.timing import Times


@dataclass(frozen=True, kw_only=True)
class RematOptions(SizesOption, BackendOption):
    """See the command's help. Shapes are experts' (G, K, F, M)."""

    command: ClassVar[str] = "remat"
    framework_names: ClassVar[tuple[str, ...]] = ("jax",)
    small: ClassVar[tuple[Shape, ...]] = SMALL_BLOCK
    published: ClassVar[tuple[Shape, ...]] = EXPERTS[2:3]

    shape: ExpertShapes = None
    kinds: SomeKinds = "current,block,mxfp8"
    layers: Annotated[int, typer.Option(help="Layers of the block.")] = 5
    unroll: Annotated[bool, typer.Option("--unroll", help="Layers one after another instead of a lax.scan.")] = False
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Also the block on jax.lax.ragged_dot in bf16.")] = (
        True
    )
    quick: Annotated[bool, typer.Option("--quick", help="One recipe, no peers, few repeats: seconds.")] = False

    def check(self) -> None:
        """See `Options`."""
        super().check()
        check_counts(layers=self.layers)

    @property
    def rows_per_problem(self) -> int:
        """Each recipe under each policy, and the framework's own."""
        return len(POLICIES) * len(self.chosen_kinds) + (self.peers and not self.quick)

    @property
    def chosen_kinds(self) -> tuple[str, ...]:
        """See `LayerOptions`; the first in a quick run."""
        chosen = super().chosen_kinds
        return chosen[:1] if self.quick else chosen


PEER = "ragged_dot bf16"
"""The kind of the same block on jax.lax.ragged_dot."""

NOTHING, PLAIN, KEPT, OUTPUTS = "no remat", "remat", "save_quantized", "save_quantized, y"
ROWS = "save_quantized of x, y"
POLICIES = (PLAIN, NOTHING, KEPT, OUTPUTS, ROWS)
"""`jax.checkpoint` without a policy; none; with quantized operands saved; with the products' results saved, too; with
those and the codes of x alone, so that kernels are quantized again."""


@dataclass(frozen=True)
class RematRow:
    """Forward and backward of the block.

    trace_s, compile_s   from Python to StableHLO, and from there to a program, nothing cached
    temporary_bytes      of the program beside its arguments and results; None where XLA does not say
    quantize, fprop      runs per step, counted in the jaxpr
    over_plain           how many times as fast as with plain remat, measured in turns; None for that itself
    """

    section: ClassVar[str] = "rows"

    shape: Shape
    sizes: str
    kind: str
    policy: str
    backends: tuple[str, ...]
    times: Times
    trace_s: float
    compile_s: float
    temporary_bytes: int | None
    quantize: int
    fprop: int
    over_plain: float | None = None

    def measures(self, rows: Sequence[RematRow]) -> dict[str, float]:
        """Seconds to compile, and how many times as fast as with plain remat and as on ragged_dot."""
        reached = {"s to compile": self.trace_s + self.compile_s}
        if self.over_plain is not None:
            reached["plain remat"] = self.over_plain
        for row in rows:
            if row.kind == PEER and (row.shape, row.sizes) == (self.shape, self.sizes):
                reached[PEER] = row.times.ms / self.times.ms
        return reached

    def as_dict(self, goals: Sequence[Goal] = ()) -> dict[str, Any]:
        """Plain values for JSON."""
        own = {
            "policy": self.policy,
            "sizes": self.sizes,
            "trace_s": round(self.trace_s, 3),
            "compile_s": round(self.compile_s, 3),
            "temporary_bytes": self.temporary_bytes,
            "runs": {"quantize": self.quantize, "fprop": self.fprop},
            **({} if self.over_plain is None else {"over_plain": round(self.over_plain, 4)}),
        }
        return layer_dict(self, goals, **own)


class Remat(Benchmark[RematOptions]):
    """Expert layers in JAX under `jax.checkpoint`, by policy.

    For each policy: the time and memory of a block of layers, how often quantizers and GEMMs run, and the time to
    compile. Plain remat quantizes x and the kernels twice; `octavo_jax.policies.save_quantized` keeps them. The
    exit code is 1 if a row fails or nothing ran. A missed goal is reported and is not a failure.
    """

    name = RematOptions.command
    options = RematOptions
    work = "octavo_bench.remat.work:remat_rows"

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
    gain("remat / it", "plain remat", "how many times as fast as jax.checkpoint without a policy"),
    gain("ragged_dot / it", PEER, "how many times as fast as the same block on jax.lax.ragged_dot in bf16"),
    Column("quantize", lambda row: str(row.row.quantize), "quantizers that run per step"),
    Column("fprop", lambda row: str(row.row.fprop), "forward GEMMs that run per step"),
    Column(
        "temporary GB",
        lambda row: number(None if row.row.temporary_bytes is None else row.row.temporary_bytes / 1e9, ".2f"),
    ),
    Column("compile s", lambda row: f"{row.row.trace_s:.1f} + {row.row.compile_s:.1f}", "to trace, and to compile"),
    GOAL,
)
