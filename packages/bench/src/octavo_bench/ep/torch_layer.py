"""The MoE layer that `octavo bench ep --framework torch` times, in one process or as one rank of several."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import octavo_torch
from octavo import DelayedScaling
from octavo_bench.ep.nvlink import STEPS, received_in_a_step
from octavo_bench.ep.peers import check_close, peer_call
from octavo_bench.ep.torch_cases import Asked, Case, Measured
from octavo_bench.errors import InputError
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.timing import Call, times_in_turn
from octavo_torch.plugin_api import record_graph

_WARM = 2  # turns before those that count: they resolve plans, agree on the call, and bring clocks up
_IN_A_ROW = 4  # steps on a GPU: of one alone the start and the last wait would be a few percent


@dataclass(frozen=True)
class Layer:
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


def layer_of(asked: Asked, case: Case, device: torch.device) -> Layer:
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
        return Layer(theirs, None, device, None, rows)
    run, keep = _captured(step, device) if asked.captured else (step, None)
    return Layer(run, keep, device, exchange, rows)


def measure(asked: Asked, case: Case, layer: Layer, alone: Layer | None = None) -> Measured:
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
        return Measured(times[0])
    beside = times[1] if len(times) > 1 else None
    if case.peer:
        nvlink = _over_nvlink(run, case.ranks, device) if device.type == "cuda" else None
        return Measured(times[0], beside, None, nvlink)
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
    return Measured(times[0], beside, received, nvlink, int(exchange.left_out))


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
