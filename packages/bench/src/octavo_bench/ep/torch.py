"""The work of `octavo bench ep --framework torch`: a MoE layer in one process, and with its experts over several.

This module starts the processes, one for each rank, which use gloo on CPUs, and NCCL with a GPU each on CUDA.
`torch_layer` is what each of them times.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes

from octavo import OctavoError
from octavo_bench.ep.options import EpOptions
from octavo_bench.ep.peers import LIGER, finish
from octavo_bench.ep.processes import end
from octavo_bench.ep.rows import EpRow
from octavo_bench.ep.torch_cases import Asked, Case, Measured, cases_of, in_order
from octavo_bench.ep.torch_layer import Layer, layer_of, measure
from octavo_bench.errors import AbsentError, InputError, RunError
from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.problem import backends_of, layer_plan
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.results import in_one_line
from octavo_bench.harness.run import Run

_MOST_PROCESSES = 8  # on a CPU
_TIMEOUT = timedelta(seconds=120)

_Answer = Measured | str | AbsentError
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
        asked = Asked(
            shape, options.chosen_choices, options.chosen_seed, options.slack, options.chosen_device,
            options.chosen_backend, options.chosen_repeats, options.weak, captured,
        )  # fmt: skip
        all_spread = captured and ranks > 1
        cases = in_order(cases_of(options, ranks), all_spread)
        run.say(f"{shape.label}: one process, then {ranks} for {sum(case.ranks > 1 for case in cases)} rows ...")
        served = cases if all_spread else [case for case in cases if case.ranks > 1]
        spread = _spread(asked, [case for case in served if case.peer != LIGER], ranks, run.notes)
        for case in cases:
            answers = _apart(asked, case, ranks, run.notes) if case.peer == LIGER else spread
            make = partial(_row, engine, asked, case, answers if case in served else None)
            yield from run.attempt(make, shape, "even", case.kind, case.text, case.peer or None)


def _apart(asked: Asked, case: Case, ranks: int, notes: list[str]) -> Iterator[_Answer]:
    """The answer for a peer that may end its processes when it fails, and therefore has processes of its own.

    Where steps are captured, the layer of one GPU is measured there first, so that the peer has it in turns with it.
    """
    if find_spec("liger_cute_kernels") is None:
        yield AbsentError(f"{LIGER} is not measured: it is not installed (no module named liger_cute_kernels)")
        return
    alone = [Case(case.kind, 1)] if asked.captured else []
    yield from islice(_spread(asked, [*alone, case], ranks, notes), len(alone), None)


def _spread(asked: Asked, cases: list[Case], ranks: int, notes: list[str]) -> Iterator[_Answer]:
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


def _row(engine: TorchEngine, asked: Asked, case: Case, spread: Iterator[_Answer] | None) -> EpRow:
    if spread is None:
        measured: _Answer = measure(asked, case, layer_of(asked, case, torch.device(asked.device)))
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


def _serve(rank: int, asked: Asked, cases: list[Case], store: str, answers: Any) -> None:
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
    alone: Layer | None = None  # of the last kind
    try:
        for case in cases:
            try:
                layer = layer_of(asked, case, device)
                measured: _Answer = measure(asked, case, layer, alone)
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
