"""`octavo bench gemm`: its options, tables and verdict. It imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import typer

from octavo.errors import one_of
from octavo.recipe_base import Gemm
from octavo_bench.errors import InputError, RunError
from octavo_bench.gemm.advice import unevenness
from octavo_bench.gemm.row import DIFFERS, IN_BOUND, GemmRow
from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.options import FRAMEWORKS, BackendOption, Ops, SizesOption, gemms_of
from octavo_bench.harness.recipes import ACCUMULATED, FAST, GemmCase, family_of, gemms_of_recipe
from octavo_bench.harness.results import Judged, Results
from octavo_bench.harness.shapes import DEEPGEMM, MODELS, SMALL, Shape
from octavo_bench.harness.table import GOAL, SPREAD, Column, Table, number, rate_text, recorded_line, spread
from octavo_bench.peers.peer import BATCHED, DENSE, Peer

_DEEPGEMM_KINDS = ("bf16", "block")


@dataclass(frozen=True, slots=True)
class Work:
    """A shape and what is measured of it. sizes: "even", "skewed"."""

    shape: Shape
    sizes: tuple[str, ...]
    cases: tuple[GemmCase, ...]

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """Those of its cases."""
        return tuple(dict.fromkeys(case.gemm for case in self.cases))


@dataclass(frozen=True, kw_only=True)
class GemmOptions(SizesOption, BackendOption):
    """See the command's help."""

    command: ClassVar[str] = "gemm"
    small: ClassVar[tuple[Shape, ...]] = SMALL
    published: ClassVar[tuple[Shape, ...]] = MODELS
    published_quick: ClassVar[tuple[Shape, ...]] = MODELS[1:3]
    default_repeats: ClassVar[Mapping[tuple[str, bool], int]] = MappingProxyType(
        {("cuda", False): 20, ("cuda", True): 8, ("cpu", False): 3, ("cpu", True): 1}
    )

    framework: Annotated[str, typer.Option(help="torch or jax.")] = "torch"
    sizes: Annotated[str, typer.Option(help="even, skewed (Dirichlet(0.5), one group empty), or both.")] = "even,skewed"
    ops: Ops = ""
    fast: Annotated[
        bool, typer.Option("--fast/--no-fast", help="Also FP8 without promotion, against peers without it.")
    ] = True
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, even groups, few repeats: seconds.")] = False

    def check(self) -> None:
        """See `Options`."""
        one_of("--framework", self.framework, tuple(FRAMEWORKS), InputError)
        super().check()
        gemms_of(self.ops)

    @property
    def chosen_frameworks(self) -> tuple[str, ...]:
        """The one framework."""
        return (self.framework,)

    @property
    def work(self) -> list[Work]:
        """Shapes in their order; on a GPU also those that DeepGEMM's figures are of, with even groups."""
        # JAX gets no buffers to add to, so an accumulator would be copied first
        accumulate = self.framework == "torch" and not self.quick
        cases = chosen_cases(
            self.chosen_kinds, gemms_of(self.ops), fast=self.fast and not self.quick, accumulate=accumulate
        )
        sizes = self.chosen_sizes[:1] if self.quick and not self.shape else self.chosen_sizes
        work = [Work(shape, sizes, tuple(cases)) for shape in self.chosen_shapes]
        if self.chosen_device == "cuda" and not self.quick and not self.shape:
            some = cases if self.kinds else [case for case in cases if case.kind in _DEEPGEMM_KINDS]
            models = {shape.key for shape in MODELS}
            work += [Work(shape, ("even",), tuple(some)) for shape in DEEPGEMM if shape.key not in models]
        return [one for one in work if one.cases]


def chosen_cases(kinds: tuple[str, ...], gemms: tuple[Gemm, ...], *, fast: bool, accumulate: bool) -> list[GemmCase]:
    """The rows of a table: every kind, its fast variant after it, and the accumulating wgrads last of each."""
    cases = []
    for kind in kinds:
        for quick in (False, True) if fast and family_of(kind) in FAST else (False,):
            own = gemms_of_recipe(kind, gemms)
            cases += [GemmCase(kind, gemm, quick) for gemm in own]
            if accumulate and "wgrad" in own and family_of(kind) in ACCUMULATED and not quick:
                cases.append(GemmCase(kind, "wgrad", accumulate=True))
    return cases


class GemmBenchmark(Benchmark[GemmOptions]):
    """Grouped GEMMs of every recipe against those of other libraries.

    Each is timed alternately with the framework's own grouped GEMM, with DeepGEMM's where it is installed, and with
    cuBLAS's dense and batched GEMMs. Operands are quantized beforehand; the quantizers' time is part of the advice.
    Sampled outputs of each GEMM are compared with float64. The exit code is 1 if one is outside its error bound, a
    GEMM fails or nothing ran. A missed goal is reported and is not a failure.
    """

    name = GemmOptions.command
    options = GemmOptions
    work = "octavo_bench.gemm.work:gemm_rows"
    sections: ClassVar[tuple[str, ...]] = ("rows", "quantize", "peers")

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """A table per shape and vector of sizes, with its peers under it."""
        groupings, peers = results.parts["groupings"], [row.row for row in results.of(Peer)]

        def below(rows: Sequence[Judged[GemmRow]]) -> Iterator[str]:
            yield from _peer_line([peer for peer in peers if _stands_beside(peer, rows[0].row)])
            yield from recorded_line(results, rows)

        yield Table(GemmRow, lambda row: f"{row.label}; {unevenness(groupings[row.label])}", _COLUMNS, below)

    def match(self, rows: Sequence[Any]) -> Mapping[str, int]:
        """Of sampled outputs."""
        matches = [row.match for row in rows if isinstance(row, GemmRow)]
        return {
            "in_bound": sum(match.startswith(IN_BOUND) for match in matches),
            "differs": sum(match.startswith(DIFFERS) for match in matches),
        }

    def closing(self, results: Results) -> Iterable[str]:
        """Advice."""
        return list(results.parts["advice"])

    def conclude(self, results: Results) -> None:
        """RunError where a GEMM is outside its bound or failed, or none was served."""
        differing = results.match["differs"]
        if differing or results.failures:
            raise RunError(
                f"{differing} GEMMs are outside their error bound and {len(results.failures)} failed; "
                "the match column and the lines with FAILED say which"
            )
        if not results.of(GemmRow):
            raise RunError("no backend serves any of these GEMMs; the notes say why, and so does `octavo why`")


def _stands_beside(peer: Peer, row: GemmRow) -> bool:
    return peer.tflops is not None and peer.shape == row.shape and peer.sizes in (row.sizes, DENSE)


def _peer_line(peers: Sequence[Peer]) -> Iterator[str]:
    rates: dict[str, list[str]] = {}
    for peer in peers:
        gemm = "" if peer.gemm == DENSE else f"{peer.gemm} "
        match = f" ({peer.match})" if peer.match else ""
        rates.setdefault(peer.name, []).append(f"{gemm}{rate_text(peer.tflops or 0.0)}{match}")
    if rates:
        yield "  peers by themselves, TFLOP/s (and how far from the product): " + "; ".join(
            f"{name} {', '.join(figures)}" for name, figures in rates.items()
        )


def _ratio(row: Judged[GemmRow], *words: str, batched: bool = False) -> str:
    """Our rate over that of the closest peer whose name has one of these words."""
    for peer, ratio in row.row.ratios.items():
        if any(word in peer for word in words) and peer.endswith(BATCHED) is batched:
            return number(ratio)
    return "-"


_COLUMNS: tuple[Column[GemmRow], ...] = (
    Column("case", lambda row: row.row.case.label),
    Column("gemm", lambda row: row.row.case.gemm),
    Column("us (10-90 %)", lambda row: spread(row.row.times, milliseconds=False), f"{SPREAD}, in microseconds"),
    Column("TFLOP/s", lambda row: rate_text(row.row.tflops)),
    Column(
        "of grouped", lambda row: _ratio(row, "grouped", "ragged"), "its rate over that of the framework's grouped GEMM"
    ),
    Column(
        "of DeepGEMM", lambda row: _ratio(row, "DeepGEMM"), "over DeepGEMM's, where it is installed and takes these"
    ),
    Column("of batched", lambda row: _ratio(row, "dense", batched=True), "over a batched GEMM of equal groups"),
    Column("of dense", lambda row: _ratio(row, "dense"), "over one dense GEMM of as many products"),
    GOAL,
    Column("backend", lambda row: row.row.backend),
    Column("match", lambda row: row.row.match.upper() if row.row.match.startswith(DIFFERS) else row.row.match),
)
