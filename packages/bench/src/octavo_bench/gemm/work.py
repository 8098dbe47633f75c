"""The work of `octavo bench gemm`: every GEMM of every shape, with its peers in the same run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby

from octavo_bench.gemm.advice import advice
from octavo_bench.gemm.benchmark import GemmOptions, Work
from octavo_bench.gemm.match import Pending, pending_match
from octavo_bench.gemm.row import GemmRow, QuantizeTime, wgrad_limit_us
from octavo_bench.harness.engine.make import make_engine
from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.pacing import steady_times
from octavo_bench.harness.problem import Data, Prepared, draw, layer_plan
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.results import rounded
from octavo_bench.harness.run import Run
from octavo_bench.harness.shapes import sizes_of
from octavo_bench.peers.of_gemms import dense_peers, grouped_peers, timed
from octavo_bench.peers.peer import Peer, peer_rates

Measured = GemmRow | QuantizeTime | Peer


def gemm_rows(run: Run[GemmOptions]) -> Iterator[Measured]:
    """Rows, quantizers' times and peers, a vector of sizes after the other."""
    options = run.options
    engine = make_engine(options.framework, options.chosen_device)
    rate = engine.copy_rate()
    run.parts |= {
        "backend": None if options.chosen_backend is None else str(options.chosen_backend),
        "copy_tb_per_s": rounded(rate),
        "groupings": {},
        "advice": [],
    }
    each = [(len(work.cases) * len(work.sizes), work.shape.flops) for work in options.work]
    run.begin(sum(rows for rows, _ in each), sum(rows * flops for rows, flops in each))
    for work in options.work:
        data = draw(engine, work.shape, options.chosen_seed)
        dense = timed(engine, data, dense_peers(engine, data, work.gemms), options.chosen_repeats)
        _note_absent(run, dense)
        yield from dense
        for name in work.sizes:
            run.say(f"{work.shape.label}, {name} ...")
            table = _Table(engine, run, data, work, name, rate)
            measured = list(table.measured(dense))
            run.parts["groupings"][f"{work.shape.label}, {name}"] = list(table.sizes)
            run.parts["advice"] += advice(measured)
            yield from measured
        del data
        engine.release()


def _note_absent(run: Run[GemmOptions], peers: Sequence[Peer]) -> None:
    run.notes.extend(peer.note for peer in peers if peer.note)


class _Table:
    """One shape with one vector of sizes."""

    def __init__(
        self, engine: Engine, run: Run[GemmOptions], data: Data, work: Work, name: str, rate: float | None
    ) -> None:
        self.engine, self.run, self.data, self.work, self.name, self.rate = engine, run, data, work, name, rate
        self.sizes = sizes_of(work.shape, name, run.options.chosen_seed)
        self.repeats = run.options.chosen_repeats

    def measured(self, dense: Sequence[Peer]) -> Iterator[Measured]:
        """Its peers, quantizers and rows."""
        grouped = timed(
            self.engine, self.data, grouped_peers(self.engine, self.name, self.sizes, self.work.gemms), self.repeats
        )
        self.engine.release()
        _note_absent(self.run, grouped)
        yield from grouped
        waiting: list[tuple[GemmRow, Pending]] = []
        for _, cases in groupby(self.work.cases, key=lambda case: (case.kind, case.fast, case.accumulate)):
            yield from self._kind(list(cases), waiting)
        with ThreadPoolExecutor() as pool:
            matches = list(pool.map(Pending.judged, [pending for _, pending in waiting]))
        for (row, _), match in zip(waiting, matches, strict=True):
            peers = peer_rates([*dense, *grouped], row.case, self.name)
            limit = wgrad_limit_us(row.case, row.shape, self.rate, peers)
            yield replace(row, match=match, peers=peers, limit_us=limit)

    def _kind(self, cases: list[GemmCase], waiting: list[tuple[GemmRow, Pending]]) -> Iterator[QuantizeTime]:
        """The GEMMs of one recipe, into `waiting`; its quantizers' time. Their memory serves the next kind."""
        first, shape = cases[0], self.work.shape
        for prepared, quantized in self.run.attempt(
            lambda: self._prepared(first), shape, self.name, first.label, first.gemm, counts=False
        ):
            if quantized is not None:
                yield quantized
            for case in cases:
                make = partial(self._row, prepared, case)
                waiting.extend(self.run.attempt(make, shape, self.name, case.label, case.gemm))

    def _prepared(self, case: GemmCase) -> tuple[Prepared, QuantizeTime | None]:
        """Operands quantized for one recipe, and how long that took."""
        plan = layer_plan(
            self.engine, self.work.shape, case.recipe, self.run.options.chosen_backend, accumulate=case.accumulate
        )
        prepared = Prepared(self.engine, self.data, self.sizes, plan)
        if not prepared.quantize or case.fast or case.accumulate:
            return prepared, None
        spent = self.engine.times(prepared.quantize, self.repeats)
        return prepared, QuantizeTime(case.kind, self.work.shape, self.name, spent)

    def _row(self, prepared: Prepared, case: GemmCase) -> tuple[GemmRow, Pending]:
        calls = prepared.call(case)
        times = steady_times(self.engine, calls, self.repeats)
        once = prepared.call(case) if case.accumulate else calls  # timed accumulators hold many products
        pending = pending_match(prepared, case, self.sizes, once[0](), self.run.options.chosen_seed)
        backend = getattr(prepared.plan, case.gemm).backend
        return GemmRow(case, prepared.shape, self.name, backend, times, "", {}), pending
