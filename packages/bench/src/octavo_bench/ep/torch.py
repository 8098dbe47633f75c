"""The work of `octavo bench ep --framework torch`: a MoE layer in one process, and with its experts over several.

Each rank is a process: with gloo on CPUs, with NCCL and a GPU each on CUDA.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes

import octavo_torch
from octavo import DelayedScaling, OctavoError
from octavo_bench.ep.benchmark import PAYLOADS, EpOptions, EpRow
from octavo_bench.ep.nvlink import STEPS, received_in_a_step
from octavo_bench.ep.peers import LIGER, TORCH, check_close, finish, peer_call
from octavo_bench.ep.processes import end
from octavo_bench.errors import AbsentError, InputError, RunError
from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.options import Names
from octavo_bench.harness.problem import backends_of, layer_plan
from octavo_bench.harness.recipes import family_of, recipe_of
from octavo_bench.harness.results import in_one_line
from octavo_bench.harness.run import Run
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Call, Times, times_in_turn
from octavo_torch.plugin_api import record_graph

_MOST_PROCESSES = 8  # on a CPU
_TIMEOUT = timedelta(seconds=120)
_WARM = 2  # turns before those that count: they resolve plans, agree on the call, and bring clocks up
_IN_A_ROW = 4  # steps on a GPU: of one alone the start and the last wait would be a few percent


@dataclass(frozen=True, slots=True)
class _Case:
    """One row of the table: a recipe's kind on one process, or on `ranks` of them.

    way, route, payload   how tokens travel, as in EpRow; of Octavo's own layer on several processes
    peer                  the library whose layer it is; "" for Octavo's own
    """

    kind: str
    ranks: int
    way: str = ""
    route: str = ""
    payload: bool = False
    peer: str = ""

    @property
    def text(self) -> str:
        """The case in a line about progress or failure."""
        codes = " as codes" if self.payload else ""
        how = self.peer or f"{self.way} {self.route}{codes}"
        return f"{self.ranks} process{'es' if self.ranks > 1 else ''} {how}".strip()


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options of the command as every process gets them."""

    shape: Shape
    choices: int
    seed: int
    slack: float
    device: str
    backend: Names
    repeats: int
    weak: bool
    captured: bool


@dataclass(frozen=True, slots=True)
class _Measured:
    """What was measured of a case.

    times      of a step
    alone      of the same layer on one device, measured in turns with it
    received   bytes of the buffers that rank 0 receives in a step
    nvlink     bytes that it receives by NVLink's counters
    dropped    choices that all ranks together left out
    """

    times: Times
    alone: Times | None = None
    received: int | None = 0
    nvlink: int | None = None
    dropped: int = 0


_Answer = _Measured | str | AbsentError
"""What a process answers for a case: the measurement, the text of an error, or that a peer library is not installed."""


def ep_rows(run: Run[EpOptions]) -> Iterator[EpRow]:
    """A row for each case: the layer in one process, and in all of them."""
    options = run.options
    engine = TorchEngine(options.chosen_device)
    ranks = options.devices_of(torch.cuda.device_count() if options.chosen_device == "cuda" else _MOST_PROCESSES)
    captured = options.chosen_device == "cuda" and not options.eager
    run.parts |= {
        "choices": options.chosen_choices, "slack": options.slack, "framework": "torch", "weak": options.weak,
        "captured": captured,
    }  # fmt: skip
    if options.chosen_device == "cpu":
        run.notes.append("processes share this machine's cores and exchange over its memory; their times say no more")
    for shape in options.chosen_shapes:
        asked = _Asked(
            shape, options.chosen_choices, options.chosen_seed, options.slack, options.chosen_device,
            options.chosen_backend, options.chosen_repeats, options.weak, captured,
        )  # fmt: skip
        all_spread = captured and ranks > 1
        cases = _in_order(_cases(options, ranks), all_spread)
        run.say(f"{shape.label}: one process, then {ranks} for {sum(case.ranks > 1 for case in cases)} rows ...")
        served = cases if all_spread else [case for case in cases if case.ranks > 1]
        spread = _spread(asked, [case for case in served if case.peer != LIGER], ranks, run.notes)
        for case in cases:
            answers = _apart(asked, case, ranks, run.notes) if case.peer == LIGER else spread
            make = partial(_row, engine, asked, case, answers if case in served else None)
            yield from run.attempt(make, shape, "even", case.kind, case.text, case.peer or None)


def _cases(options: EpOptions, ranks: int) -> Iterator[_Case]:
    for kind in options.chosen_kinds:
        yield _Case(kind, 1)
        if ranks == 1:
            continue
        for way, route in product(options.chosen_ways, options.chosen_routes):
            yield _Case(kind, ranks, way, route)
            if family_of(kind) in PAYLOADS:
                yield _Case(kind, ranks, way, route, payload=True)
        if kind == "bf16" and options.peers:
            yield _Case(kind, ranks, peer=TORCH)
            if options.chosen_device == "cuda":
                yield _Case(kind, ranks, peer=LIGER)


def _in_order(cases: Iterator[_Case], all_spread: bool) -> list[_Case]:
    """The cases in an order in which no two measurements overlap: spawned processes go on to their next case while
    this process reads an answer.

    Cases of one device, which this process measures itself, come before all others; with `all_spread` the spawned
    processes measure them, too. LigerCute comes last, because it has processes of its own.
    """
    return sorted(cases, key=lambda case: (case.ranks > 1 and not all_spread, case.peer == LIGER))


def _apart(asked: _Asked, case: _Case, ranks: int, notes: list[str]) -> Iterator[_Answer]:
    """The answer for a peer that may end its processes when it fails, and therefore has processes of its own.

    Where steps are captured, the layer of one GPU is measured there first, so that the peer has it in turns with it.
    """
    if find_spec("liger_cute_kernels") is None:
        yield AbsentError(f"{LIGER} is not measured: it is not installed (no module named liger_cute_kernels)")
        return
    alone = [_Case(case.kind, 1)] if asked.captured else []
    yield from islice(_spread(asked, [*alone, case], ranks, notes), len(alone), None)


def _spread(asked: _Asked, cases: list[_Case], ranks: int, notes: list[str]) -> Iterator[_Answer]:
    """The answer for each case from `ranks` processes, which are started when the first answer is asked for.

    notes   gets a sentence where the processes do not end
    """
    if not cases:
        return
    answers = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes: Any = start_processes(  # type: ignore[no-untyped-call]
            _serve, (asked, cases, str(Path(folder, "store")), answers), nprocs=ranks, join=False, start_method="spawn"
        )
        for number in range(len(cases)):
            while answers.empty():
                processes.join(timeout=0.05)  # raises what a process has raised
            answer = answers.get()
            if number + 1 == len(cases):  # before the yield: whoever has the last answer asks for no further one
                end(processes, notes)
            yield answer


def _row(engine: TorchEngine, asked: _Asked, case: _Case, spread: Iterator[_Answer] | None) -> EpRow:
    if spread is None:
        measured: _Answer = _measure(asked, case, _layer(asked, case, torch.device(asked.device)))
    else:
        measured = next(spread, "not measured: the processes had ended at an earlier row")
    if isinstance(measured, AbsentError):
        raise measured
    if isinstance(measured, str):
        raise RunError(measured)
    shape = asked.shape
    plan = layer_plan(engine, replace(shape, n=2 * shape.n), recipe_of(case.kind), asked.backend)
    return EpRow(
        shape=shape,
        kind=case.kind,
        devices=case.ranks,
        way=case.peer or case.way,
        route=case.route,
        payload=case.payload,
        backends=() if case.peer else backends_of(plan),
        received=measured.received,
        nvlink=measured.nvlink,
        dropped=measured.dropped,
        times=measured.times,
        alone=measured.alone,
    )


def _serve(rank: int, asked: _Asked, cases: list[_Case], store: str, answers: Any) -> None:
    """What a spawned process runs: all cases in their order; rank 0 sends the answers."""
    ranks = cases[-1].ranks
    cuda = asked.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(torch.get_num_threads() // ranks, 1))
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=_TIMEOUT,
        device_id=device if cuda else None,
    )  # fmt: skip
    alone: _Layer | None = None  # of the last kind
    try:
        for case in cases:
            try:
                layer = _layer(asked, case, device)
                measured: _Answer = _measure(asked, case, layer, alone)
                alone = layer if case.ranks == 1 else alone
            except (OctavoError, InputError) as error:
                measured = in_one_line(error)
                alone = None if case.ranks == 1 else alone
            except Exception as error:
                if not case.peer:
                    raise
                measured = error if isinstance(error, AbsentError) else in_one_line(error)
            if rank == 0:
                answers.put(measured)
        dist.barrier()
        finish()
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Layer:
    """A step that can be timed.

    keep       what the step's graph needs alive
    exchange   how its tokens travel, with the counter of choices that were left out; None in one process
    rows       how many all ranks have together
    """

    run: Call
    keep: object
    device: torch.device
    exchange: octavo_torch.Exchange | None
    rows: int


def _layer(asked: _Asked, case: _Case, device: torch.device) -> _Layer:
    """Forward and backward of this process's share, in a CUDA graph where `asked.captured` says so."""
    rank, recipe = dist.get_rank() if case.ranks > 1 else 0, recipe_of(case.kind)
    if isinstance(recipe, DelayedScaling):
        raise InputError("--recipes names delayed, which keeps a state; bench ep times recipes without one")
    groups, k, f, rows = asked.shape.key
    if asked.weak:
        rows *= case.ranks
    tokens, experts = rows // asked.choices // case.ranks, groups // case.ranks
    draw = torch.Generator(device).manual_seed(asked.seed + rank)

    def leaf(*sides: int) -> torch.Tensor:
        values = torch.randn(sides, generator=draw, device=device, dtype=torch.float32).mul_(sides[-1] ** -0.5)
        return values.bfloat16().requires_grad_()

    leaves = [leaf(tokens, k), leaf(experts, 2 * f, k), leaf(experts, k, f)]
    weights = torch.full((tokens, asked.choices), 1 / asked.choices, device=device, requires_grad=True)
    first = rank * tokens * asked.choices
    choices = (torch.arange(tokens * asked.choices, device=device) + first).view(tokens, -1) % groups
    dy = torch.randn((tokens, k), generator=draw, device=device).bfloat16()
    exchange = None
    if case.ranks > 1 and case.peer:
        exchange = octavo_torch.Exchange(rows=math.ceil(asked.slack * rows / case.ranks))
    elif case.ranks > 1:
        exchange = octavo_torch.Exchange(
            payload=recipe if case.payload else None,
            returns=case.way,  # type: ignore[arg-type]
            rows=math.ceil(asked.slack * rows / case.ranks),
            left_out=torch.zeros(1, dtype=torch.int64, device=device),
            route=case.route,  # type: ignore[arg-type]
        )

    def step() -> Sequence[torch.Tensor]:
        x, w1, w2 = leaves
        y = octavo_torch.moe_mlp(
            x, choices, weights, w1, w2, recipe=recipe, seed=0 if recipe.stochastic else None, backend=asked.backend,
            ep=None if exchange is None else dist.group.WORLD, exchange=exchange,
        )  # fmt: skip
        return torch.autograd.grad(y, [*leaves, weights], dy)

    if case.peer:
        theirs = peer_call(case.peer, [*leaves, weights], choices, dy, groups)
        check_close(case.peer, theirs(), step())
        return _Layer(theirs, None, device, None, rows)
    run, keep = _captured(step, device) if asked.captured else (step, None)
    return _Layer(run, keep, device, exchange, rows)


def _measure(asked: _Asked, case: _Case, layer: _Layer, alone: _Layer | None = None) -> _Measured:
    """Times the layer of a case, and counts what it receives.

    alone   the layer on one GPU, with which the one over several is timed in turns, so both run at the same clocks
    """
    device, run, exchange = layer.device, layer.run, layer.exchange
    runs = [run] if alone is None or case.ranks == 1 else [run, alone.run]
    for each in _WARM * runs:
        _timed(each, device)
    times = times_in_turn(
        [[each] for each in runs],
        asked.repeats,
        lambda calls: _slowest([_timed(call, device) for call in calls], device),
    )
    if case.ranks == 1:
        return _Measured(times[0])
    beside = times[1] if len(times) > 1 else None
    if case.peer:
        nvlink = _over_nvlink(run, case.ranks, device) if device.type == "cuda" else None
        return _Measured(times[0], beside, None, nvlink)
    assert exchange is not None  # of our layers over several
    assert exchange.left_out is not None  # _layer gives one
    exchange.left_out.zero_()
    _timed(run, device)
    dist.all_reduce(exchange.left_out)
    groups, k, f, _ = asked.shape.key
    tokens = layer.rows // asked.choices // case.ranks
    received = octavo_torch.bytes_exchanged(
        octavo_torch.MoeShape(tokens, asked.choices, groups, k, f), case.ranks, exchange
    ).travelling(dist.get_rank())
    nvlink = _over_nvlink(run, case.ranks, device) if device.type == "cuda" else None
    return _Measured(times[0], beside, received, nvlink, int(exchange.left_out))


def _slowest(times: list[float], device: torch.device) -> list[float]:
    """The largest of all ranks' times of each step, because the ranks wait for the slowest.

    Also for a layer on one device, which all ranks run at the same time: the GPUs of a host are not equally fast.
    """
    if not dist.is_initialized():
        return times
    of_all = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    found: list[float] = of_all.tolist()
    return found


def _captured(step: Call, device: torch.device) -> tuple[Call, object]:
    """The replay of a CUDA graph of the step, and what has to be kept alive for it."""
    graph, result = record_graph(step, device)
    return graph.replay, (step, result)


def _over_nvlink(run: Call, ranks: int, device: torch.device) -> int | None:
    """Bytes that a rank receives in a step, by the counters of all the host's GPUs; None on ranks other than 0.

    All ranks have to call it, because a step needs all of them.
    """

    def steps(count: int) -> None:
        for _ in range(count):
            run()
        torch.cuda.synchronize(device)
        dist.barrier()
        torch.cuda.synchronize(device)

    if dist.get_rank() == 0:
        return received_in_a_step(steps, ranks)
    steps(STEPS)
    return None


def _timed(run: Call, device: torch.device) -> float:
    """Microseconds of a step, from a barrier of all ranks until this rank's device is idle; on a GPU the mean of a few
    steps in a row."""
    cuda = device.type == "cuda"
    count = _IN_A_ROW if cuda else 1
    if dist.is_initialized():
        dist.barrier()
    if cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    if cuda:
        torch.cuda.synchronize(device)
    return 1e6 * (time.perf_counter() - start) / count
