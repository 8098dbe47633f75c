"""The work of `octavo bench gemm`: every GEMM of every shape, in turns with its peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby

from octavo_bench.gemm.advice import advice
from octavo_bench.gemm.benchmark import GemmOptions, Work
from octavo_bench.gemm.match import Pending, pending_match
from octavo_bench.gemm.peer_match import peer_match
from octavo_bench.gemm.row import GemmRow, QuantizeTime, wgrad_limit_us
from octavo_bench.harness.engine.make import make_engine
from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.problem import Data, Prepared, draw, layer_plan
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.results import rounded
from octavo_bench.harness.run import Run
from octavo_bench.harness.shapes import sizes_of
from octavo_bench.peers.of_gemms import Candidate, dense_peers, grouped_peers, timed, timed_in_turns
from octavo_bench.peers.peer import Peer, beside

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
        of_dense = list(dense_peers(engine, data, work.gemms))
        dense = timed(engine, data, of_dense, options.chosen_repeats)
        _note_absent(run, dense)
        yield from dense
        for name in work.sizes:
            run.say(f"{work.shape.label}, {name} ...")
            table = _Table(engine, run, data, work, name, rate)
            measured = list(table.measured(_present(of_dense, dense)))
            run.parts["groupings"][f"{work.shape.label}, {name}"] = list(table.sizes)
            run.parts["advice"] += advice(measured)
            yield from measured
        del data
        engine.release()


def _present(candidates: Sequence[Candidate], peers: Sequence[Peer]) -> list[Candidate]:
    return [one for one, peer in zip(candidates, peers, strict=True) if peer.times is not None]


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
        self.peers: list[Candidate] = []

    def measured(self, dense: Sequence[Candidate]) -> Iterator[Measured]:
        """Its peers, quantizers and rows; `dense` are the peers that stand beside all sizes."""
        candidates = list(grouped_peers(self.engine, self.name, self.sizes, self.work.gemms))
        judge = partial(peer_match, self.engine, self.data, self.sizes, self.run.options.chosen_seed)
        grouped = timed(self.engine, self.data, candidates, self.repeats, judge)
        self.peers = [*dense, *_present(candidates, grouped)]
        self.engine.release()
        _note_absent(self.run, grouped)
        yield from grouped
        waiting: list[tuple[GemmRow, Pending]] = []
        for _, cases in groupby(self.work.cases, key=lambda case: (case.kind, case.fast, case.accumulate)):
            yield from self._kind(list(cases), waiting)
        with ThreadPoolExecutor() as pool:
            matches = list(pool.map(Pending.judged, [pending for _, pending in waiting]))
        for (row, _), match in zip(waiting, matches, strict=True):
            limit = wgrad_limit_us(row.case, row.shape, self.rate, row.peers)
            yield replace(row, match=match, limit_us=limit)

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
        others = beside(self.peers, case, self.name).values()
        turns = timed_in_turns(self.engine, calls, self.data, others, self.repeats)
        self.run.notes.extend(turns.notes)
        rates = {name: prepared.shape.tflops(times.median) for name, times in turns.peers.items()}
        once = prepared.call(case) if case.accumulate else calls  # timed accumulators hold many products
        pending = pending_match(prepared, case, self.sizes, once[0](), self.run.options.chosen_seed)
        backend = getattr(prepared.plan, case.gemm).backend
        return GemmRow(case, prepared.shape, self.name, backend, turns.times, "", rates), pending
