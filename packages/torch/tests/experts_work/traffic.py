"""What is handed to collectives, and what is read on the host."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from moe_layers import RECIPES
from torch import Tensor

from experts_work.bits import decoded
from experts_work.problems import ROUTINGS, C, E, F, K, N, draw, group_of, rows_of, run
from octavo_torch import Exchange, MoeShape, bytes_exchanged
from octavo_torch.bridge import BRIDGE


class Recorder:
    """all_to_all_single with the bytes to and from each rank of every call."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.calls = ranks, []

    def __call__(self, out: Tensor, given: Tensor, received: Any, sent: Any, group: Any) -> None:
        self.calls.append((self._split(given, sent), self._split(out, received)))
        _all_to_all_single(out, given, received, sent, group)

    def _split(self, value: Tensor, shares: list[int] | None) -> tuple[int, ...]:
        each = value.shape[0] // self.ranks
        row = value.nbytes // max(value.shape[0], 1)
        return tuple(row * count for count in shares or [each] * self.ranks)


_all_to_all_single = dist.all_to_all_single


def bytes_on_the_wire(ranks: int, seed: int) -> list[str]:
    """Where what is handed to the collective is not what bytes_exchanged says, in bytes to and from each rank."""
    group, number = group_of(ranks)
    me, found = group.rank(), []
    problem = draw(seed + number, ROUTINGS["few"][:ranks], "random")
    mine = problem.mine(me, ranks)
    shape = MoeShape(mine.counts[0], C, E, K, F, N)
    static = dict(zip(("rows", "pair_rows"), rows_of(problem, ranks), strict=True))
    for payload in (None, "fp8-block", "mxfp8", "fp8-row"):
        for returns in ("rows", "sums"):
            for bounds in ({}, static):
                exchange = Exchange(payload=payload, returns=returns, **bounds)
                said = bytes_exchanged(shape, ranks, exchange, choices=mine.choices)
                recorder = dist.all_to_all_single = Recorder(ranks)
                try:
                    run(mine.anew(), RECIPES["mxfp8"], ep=group, exchange=exchange)
                finally:
                    dist.all_to_all_single = _all_to_all_single
                planes = 1 if payload is None else 2
                order = [("signatures", 1), ("choices", 1), ("tokens", planes), ("y", 1), ("dy", planes), ("dx", 1),
                         ("dweights", 1)]  # fmt: skip
                calls = iter(recorder.calls)
                for name, count in order:
                    side = 0 if name in said.away else 1
                    parts = [next(calls)[side] for _ in range(count)]
                    seen = tuple(map(sum, zip(*parts, strict=True)))
                    wanted = (said.away if side == 0 else said.back)[name]
                    if seen != wanted:
                        found.append(f"{payload} {returns} {bounds} {name}: {seen}, said {wanted}")
                found += [f"one more: {call}" for call in calls]
    return found


def reads_on_the_host(ranks: int, seed: int) -> list[int]:
    """How often a forward and backward after the first waits for a tensor's values, beyond what the reference reads of
    sizes in one process and for quantizing alone: with sizes that are read; with static buffers, rows and tokens as
    they are; with static buffers, sums and codes, by collectives and in peer memory."""
    group, number = group_of(ranks)
    problem = draw(seed + number, [6] * ranks, "random")
    rows, pairs = rows_of(problem, ranks)
    recipe, found = RECIPES["fp8-block"], []
    alone = len(BRIDGE.host_reads(lambda: run(problem, recipe)))
    coded = len(BRIDGE.host_reads(lambda: [decoded(problem.dy, recipe, operand) for operand in ("x", "dy")]))
    for exchange in (
        Exchange(),
        Exchange(rows=rows, left_out=torch.zeros(1, dtype=torch.int64)),
        Exchange(rows=rows, pair_rows=pairs, payload="fp8-block", returns="sums"),
        Exchange(rows=rows, pair_rows=pairs, payload="fp8-block", returns="sums", route="peer"),
    ):

        def step(exchange: Exchange = exchange) -> None:
            run(problem.mine(group.rank(), ranks), recipe, ep=group, exchange=exchange)

        step()
        found.append(len(BRIDGE.host_reads(step)) - alone - (coded if exchange.payload else 0))
    return found
