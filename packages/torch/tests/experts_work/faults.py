"""What fails: too little room, ranks that call otherwise, ranks that do not come."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from moe_layers import RECIPES, REFERENCE
from torch import Tensor

from experts_work.problems import C, E, F, K, N, Problem, differences, draw, group_of, rows_of, run
from octavo_torch import Exchange, ExchangeError, RowsLeftOutError, check_errors, moe_mlp
from octavo_torch.moe.parallel import group as parallel_group


def left_out(ranks: int, seed: int) -> list[Any]:
    """Buffers that are too small: (what differs from one process without the choices that found no room), and what
    check_errors says after it and after buffers that are large enough."""
    group, number = group_of(ranks)
    me = group.rank()
    counts, recipe = [6] * ranks, RECIPES["mxfp8"]
    problem = draw(seed + number, counts, "random")
    rows, pairs = (max(most // 2, 1) for most in rows_of(problem, ranks))
    kept, lost = _with_room(problem, ranks, rows, pairs)
    whole = run(Problem(problem.given, kept, problem.dy, counts), recipe)
    counter = torch.zeros(1, dtype=torch.int64)
    mine = problem.mine(me, ranks)
    spread = run(mine, recipe, ep=group, exchange=Exchange(rows=rows, pair_rows=pairs, left_out=counter))
    found: list[Any] = [*differences(spread, whole, counts, me, ranks)]
    if not torch.equal(counter, lost[me : me + 1]):
        found.append(f"left out {counter.tolist()}, and not {lost[me]}")
    for exchange in (None, Exchange(rows=sum(counts) * C)):
        try:
            check_errors()
            found.append("fine")
        except RowsLeftOutError as error:
            found.append(str(error))
        run(problem.mine(me, ranks), recipe, ep=group, exchange=exchange)
    return [*found, bool(lost[me])]


def _with_room(problem: Problem, ranks: int, rows: int, pairs: int) -> tuple[Tensor, Tensor]:
    """The choices with -1 for those that find no room, one by one; and how many are counted on each rank."""
    choices, lost = problem.choices.clone(), torch.zeros(ranks, dtype=torch.int64)
    sources = torch.arange(ranks).repeat_interleave(torch.tensor(problem.counts))
    used: dict[tuple[int, int], int] = {}
    at_rank: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in range(ranks)}
    for token in range(choices.shape[0]):
        for choice in range(C):
            expert, source = int(choices[token, choice]), int(sources[token])
            if not 0 <= expert < E:
                continue
            pair = source, expert // (E // ranks)
            used[pair] = used.get(pair, 0) + 1
            if used[pair] > pairs:
                choices[token, choice] = -1
                lost[source] += 1
            else:
                at_rank[pair[1]].append((expert, token, choice))
    for rank, arrived in at_rank.items():
        for _, token, choice in sorted(arrived)[rows:]:
            choices[token, choice] = -1
            lost[rank] += 1
    return choices, lost


def _call(group: Any, tokens: int = 4, recipe: Any = "mxfp8", exchange: Any = None, **sides: Any) -> Tensor:
    k, experts, dtype = sides.get("k", K), sides.get("experts", 2), sides.get("dtype", torch.bfloat16)
    x = torch.randn(tokens, k, dtype=dtype)
    w1, w2 = torch.randn(experts, 2 * F, k, dtype=dtype), torch.randn(experts, N, F, dtype=dtype, requires_grad=True)
    choices = torch.randint(0, 2 * dist.get_world_size(), (tokens, sides.get("choices", C)))
    weights = torch.rand(choices.shape, requires_grad=sides.get("trains", False))
    return moe_mlp(x, choices, weights, w1, w2, recipe=recipe, backend=REFERENCE, ep=group, exchange=exchange)


def otherwise() -> list[tuple[str, str, float]]:
    """Rank 1 calls a layer otherwise than the others: (what, this rank's error, seconds); and a call that works."""
    rank, found = dist.get_rank(), []
    group = dist.new_group(timeout=timedelta(seconds=20))
    cases: dict[str, dict[str, Any]] = {
        "in_features": {"k": 128}, "dtype": {"dtype": torch.float32}, "recipe": {"recipe": "fp8-block"},
        "experts": {"experts": 4}, "choices": {"choices": 1}, "gradients": {"trains": True},
        "returns": {"exchange": Exchange(returns="sums")}, "payload": {"exchange": Exchange(payload="mxfp8")},
        "rows": {"exchange": Exchange(rows=50)},
    }  # fmt: skip
    for what, difference in cases.items():
        start = time.monotonic()
        try:
            _call(group, **(difference if rank == 1 else {}))
            found.append((what, "", 0.0))
        except ExchangeError as error:
            found.append((what, str(error), time.monotonic() - start))
    _call(group, tokens=rank)  # the group is as good as before
    return found


def with_timeout(timeout: float, grace: float) -> dist.ProcessGroup:
    """A group whose faults take this long."""
    parallel_group.GRACE_SECONDS = grace
    group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=timeout))
    return group


def agreed_before(route: Any) -> str:
    """In a static exchange all ranks have made two calls, and then rank 1 makes one where the others make the other:
    what check_errors says, and that it says nothing afterwards."""
    rank, exchange = dist.get_rank(), Exchange(rows=60, route=route)
    for recipe in ("mxfp8", "fp8-block"):
        _call(dist.group.WORLD, exchange=exchange, recipe=recipe)
    check_errors()
    _call(dist.group.WORLD, exchange=exchange, recipe="mxfp8" if rank == 1 else "fp8-block")
    said = ""
    try:
        check_errors()
    except ExchangeError as error:
        said = str(error)
    _call(dist.group.WORLD, exchange=exchange, recipe="mxfp8")
    check_errors()
    return said


def changes_alone(timeout: float, grace: float, route: Any) -> tuple[str, float]:
    """With static buffers, rank 1 comes with fewer tokens than before, and the others wait for it."""
    rank, group = dist.get_rank(), with_timeout(timeout, grace)
    exchange = Exchange(rows=60, route=route)
    _call(group, exchange=exchange)
    start = time.monotonic()
    try:
        _call(group, tokens=3 if rank == 1 else 4, exchange=exchange)
    except ExchangeError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


def does_not_come(timeout: float, grace: float, backward: bool, exchange: Exchange | None) -> tuple[str, float]:
    """Rank 1 leaves out the forward, or the backward."""
    rank, group = dist.get_rank(), with_timeout(timeout, grace)
    y = _call(group, exchange=exchange)
    start = time.monotonic()
    try:
        if rank != 1:
            y.sum().backward() if backward else _call(group, exchange=exchange)
    except ExchangeError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


def ends(grace: float, backward: bool, exchange: Exchange | None) -> tuple[str, float]:
    """The last rank's process ends in front of the forward, or of the backward."""
    parallel_group.GRACE_SECONDS = grace
    y = _call(dist.group.WORLD, exchange=exchange)
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(3)
    start = time.monotonic()
    try:
        y.sum().backward() if backward else _call(dist.group.WORLD, exchange=exchange)
    except ExchangeError as error:
        return str(error), time.monotonic() - start
    return "", 0.0
