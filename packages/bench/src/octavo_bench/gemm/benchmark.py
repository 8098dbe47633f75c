"""`octavo bench gemm`: its tables and its verdict. Importing this module imports neither numpy nor a framework."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from octavo_bench.errors import RunError
from octavo_bench.gemm.advice import wasted_rows
from octavo_bench.gemm.options import GemmOptions
from octavo_bench.gemm.row import DIFFERS, IN_BOUND, GemmRow
from octavo_bench.harness.benchmark import Benchmark
from octavo_bench.harness.results import Judged, Results
from octavo_bench.harness.run import Run
from octavo_bench.harness.table import GOAL, Column, Table, number, rate_text, recorded_line
from octavo_bench.peers.peer import BATCHED, DENSE, Peer


class Gemm(Benchmark[GemmOptions]):
    """Grouped GEMMs of every kind beside the framework's own, cuBLAS's dense and batched ones, and goals.

    Operands are quantized beforehand; the quantizers' time is in the advice. Sampled outputs of each GEMM are compared
    with float64. Exit code 1 where one is outside its error bound, a GEMM fails or nothing ran; a goal that is missed
    is reported and no failure.
    """

    name = GemmOptions.command
    options = GemmOptions
    sections: ClassVar[tuple[str, ...]] = ("rows", "quantize", "peers")

    def rows(self, run: Run[GemmOptions]) -> Iterable[Any]:
        """See `Benchmark`."""
        from octavo_bench.gemm.work import gemm_rows

        return gemm_rows(run)

    def tables(self, results: Results) -> Iterable[Table[Any]]:
        """A table per shape and vector of sizes, with its peers under it."""
        groupings, peers = results.parts["groupings"], [row.row for row in results.of(Peer)]

        def below(rows: Sequence[Judged[GemmRow]]) -> Iterator[str]:
            yield from _peer_line([peer for peer in peers if _stands_beside(peer, rows[0].row)])
            yield from recorded_line(results, rows)

        yield Table(GemmRow, lambda row: f"{row.label}; {wasted_rows(groupings[row.label])}", _COLUMNS, below)

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
        rates.setdefault(peer.name, []).append(f"{gemm}{rate_text(peer.tflops or 0.0)}")
    if rates:
        yield "  peers, TFLOP/s: " + "; ".join(f"{name} {', '.join(figures)}" for name, figures in rates.items())


def _ratio(row: Judged[GemmRow], *words: str, batched: bool = False) -> str:
    """Our rate over that of the closest peer whose name has one of these words."""
    for peer, ratio in row.row.ratios.items():
        if any(word in peer for word in words) and peer.endswith(BATCHED) is batched:
            return number(ratio)
    return "-"


_COLUMNS: tuple[Column[GemmRow], ...] = (
    Column("case", lambda row: row.row.case.label),
    Column("gemm", lambda row: row.row.case.gemm),
    Column("us", lambda row: f"{row.row.times.median:.1f}"),
    Column("TFLOP/s", lambda row: rate_text(row.row.tflops)),
    Column("of grouped", lambda row: _ratio(row, "grouped", "ragged")),
    Column("of batched", lambda row: _ratio(row, "dense", batched=True)),
    Column("of dense", lambda row: _ratio(row, "dense")),
    GOAL,
    Column("backend", lambda row: row.row.backend),
    Column("match", lambda row: row.row.match.upper() if row.row.match.startswith(DIFFERS) else row.row.match),
)
