"""The work of `octavo bench gemm`: every GEMM of every shape, with its peers in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from octavo import NoBackendError
from octavo.recipe_base import Gemm
from octavo_bench.gemm.advice import advice
from octavo_bench.gemm.match import Pending, pending_match
from octavo_bench.gemm.row import GemmResults, GemmRow, QuantizeTime, Table, peer_rates
from octavo_bench.harness.engine.protocol import Engine, make_engine
from octavo_bench.harness.goals import Neighbours, gemm_goals
from octavo_bench.harness.problem import Data, Names, Prepared, draw, layer_plan
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.results import Failure, facts_of, told
from octavo_bench.harness.shapes import Shape, sizes_of
from octavo_bench.harness.steady import steady_times
from octavo_bench.peers.peer import Peer, dense_peers, grouped_peers, timed
from octavo_bench.quantize.case import Grouping

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Work:
    """Shapes and what is measured of each. sizes: "even", "skewed"."""

    shape: Shape
    sizes: tuple[str, ...]
    cases: tuple[GemmCase, ...]


@dataclass(frozen=True, slots=True)
class Choices:
    """What the command line asked for, checked."""

    framework: str
    device: str
    work: tuple[Work, ...]
    backend: Names
    repeats: int
    seed: int
    peers: bool


def bench_gemm(choices: Choices, command: str, say: Say) -> GemmResults:
    """Run everything; `say` hears where it is. A case that fails is kept as a `Failure`, and the others go on."""
    start = time.perf_counter()
    engine = make_engine(choices.framework, choices.device)
    rate = engine.copy_rate()
    failures: list[Failure] = []
    tables: list[Table] = []
    for work in choices.work:
        tables += _Bench(engine, choices, work, failures, say).tables()
        engine.release()
    judged = choices.device == "cuda"
    about = facts_of(choices, command, start, choices.framework)
    h200 = "H200" in str(about["machine"].get("gpu"))
    tables = [_with_goals(table, tables, rate, h200) if judged else table for table in tables]
    return GemmResults(
        **about,
        framework=choices.framework,
        backend=None if choices.backend is None else str(choices.backend),
        copy_tb_per_s=rate,
        tables=tables,
        advice=[line for table in tables for line in advice(table)],
        failures=failures,
    )


class _Bench:
    """One shape's part of a run."""

    def __init__(self, engine: Engine, choices: Choices, work: Work, failures: list[Failure], say: Say) -> None:
        self.engine, self.choices, self.work, self.failures, self.say = engine, choices, work, failures, say
        self.notes: list[str] = []
        self.waiting: list[tuple[GemmRow, Pending | str]] = []

    def tables(self) -> list[Table]:
        """A table a vector of sizes."""
        choices, shape = self.choices, self.work.shape
        data = draw(self.engine, shape, choices.seed)
        dense = timed(self.engine, data, dense_peers(self.engine, data), choices.repeats) if choices.peers else []
        made = []
        for name in self.work.sizes:
            grouping = sizes_of(shape, name, choices.seed)
            self.say(f"{shape.label}, {name} ...")
            self.notes, self.waiting = [], []
            peers = [*dense, *self._grouped(data, name, grouping)]
            quantize = self._kinds(data, name, grouping)
            rows = self._judged(peers, name)
            notes = [*self.notes, *(peer.note for peer in peers if peer.note)]
            made.append(Table(shape, name, grouping.sizes, rows, tuple(quantize), tuple(peers), tuple(notes)))
        return made

    def _grouped(self, data: Data, name: str, grouping: Grouping) -> list[Peer]:
        if not self.choices.peers:
            return []
        gemms: tuple[Gemm, ...] = tuple(dict.fromkeys(case.gemm for case in self.work.cases))
        found = timed(
            self.engine, data, grouped_peers(self.engine, data, name, grouping.sizes, gemms), self.choices.repeats
        )
        self.engine.release()
        return found

    def _kinds(self, data: Data, name: str, grouping: Grouping) -> list[QuantizeTime]:
        """Rows into `waiting`; the quantizers' times."""
        times = []
        for recipe in dict.fromkeys((case.kind, case.fast, case.accumulate) for case in self.work.cases):
            cases = [case for case in self.work.cases if (case.kind, case.fast, case.accumulate) == recipe]
            first = cases[0]
            try:
                plan = layer_plan(
                    self.engine, data.shape, first.recipe, self.choices.backend, accumulate=first.accumulate
                )
                prepared = Prepared(self.engine, data, grouping.sizes, plan)
                if prepared.quantize and not (first.fast or first.accumulate):
                    spent = self.engine.times(prepared.quantize, self.choices.repeats)
                    times.append(QuantizeTime(first.kind, data.shape, name, spent))
            except NoBackendError as error:
                self.notes.append(f"{first.label}: {' '.join(str(error).split())[:300]}")
                continue
            except Exception as error:  # the other rows are worth having, and the command fails at its end
                self._failed(first, name, error)
                continue
            for case in cases:
                self._case(prepared, case, name, grouping)
            del prepared  # its memory serves the next kind
        return times

    def _case(self, prepared: Prepared, case: GemmCase, name: str, grouping: Grouping) -> None:
        try:
            calls = prepared.call(case)
            times = steady_times(self.engine, calls, self.choices.repeats)
            once = prepared.call(case) if case.accumulate else calls  # timed accumulators hold many products
            pending = pending_match(prepared, case, grouping.sizes, once[0](), self.choices.seed)
        except Exception as error:  # as above
            self._failed(case, name, error)
            return
        backend = getattr(prepared.plan, case.gemm).backend
        row = GemmRow(case, prepared.shape, name, backend, times, "", {})
        self.waiting.append((row, pending))

    def _failed(self, case: GemmCase, name: str, error: Exception) -> None:
        self.failures.append(Failure(f"{case.label} {case.gemm}", self.work.shape.key, name, told(error)))

    def _judged(self, peers: Sequence[Peer], name: str) -> tuple[GemmRow, ...]:
        """The rows with their match and their peers."""
        with ThreadPoolExecutor() as pool:
            matches = list(pool.map(_match, [pending for _, pending in self.waiting]))
        return tuple(
            replace(row, match=match, peers=peer_rates(peers, row.case, name))
            for (row, _), match in zip(self.waiting, matches, strict=True)
        )


def _match(pending: Pending | str) -> str:
    return pending if isinstance(pending, str) else pending.judged()


def _with_goals(table: Table, tables: Sequence[Table], rate: float | None, h200: bool) -> Table:
    even = {
        row.case: row.tflops
        for other in tables
        if other.shape == table.shape and other.sizes == "even"
        for row in other.rows
    }
    own = {row.case: row.tflops for row in table.rows}
    rows = []
    for row in table.rows:
        near = Neighbours(
            peers=row.peers,
            even=even.get(row.case),
            accumulating=own.get(replace(row.case, fast=False, accumulate=True)),
            copy_tb_per_s=rate,
            h200=h200,
        )
        rows.append(replace(row, goals=gemm_goals(row.case, row.shape, row.sizes, row.tflops, near)))
    return replace(table, rows=tuple(rows))
