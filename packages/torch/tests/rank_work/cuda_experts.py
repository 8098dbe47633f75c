"""What ranks with a GPU each do in the tests of experts that are spread over them: importable by name."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from octavo_torch import Exchange, check_errors, explain_exchange, moe_mlp
from octavo_torch.plugin_api import record_graph

E, C, K, F, N, T = 16, 4, 512, 256, 384, 300
"""Experts of all ranks, choices, sides, and tokens of each rank."""


class Problem(NamedTuple):
    """Tokens of a rank, or of all ranks in their order, with experts."""

    given: dict[str, Tensor]
    choices: Tensor
    dy: Tensor


def draw(seed: int, ranks: int) -> Problem:
    """Of all ranks. Some choices go nowhere, some experts have no tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sides: int) -> Tensor:
        return torch.randn(sides, generator=generator).bfloat16()

    choices = torch.rand(ranks * T, E, generator=generator).argsort(1)[:, :C]
    choices[choices % 5 == 3] = -1
    given = {
        "x": normal(ranks * T, K),
        "weights": torch.rand(ranks * T, C, generator=generator),
        "w1": normal(E, 2 * F, K) / 16,
        "w2": normal(E, N, F) / 16,
    }
    return Problem(given, choices, normal(ranks * T, N))


def here(problem: Problem, rank: int, ranks: int, device: str) -> Problem:
    """A rank's part on its device, as leaves."""
    tokens, experts = slice(rank * T, (rank + 1) * T), slice(rank * E // ranks, (rank + 1) * E // ranks)
    given = {
        name: value[tokens if name in ("x", "weights") else experts].to(device).clone().requires_grad_()
        for name, value in problem.given.items()
    }
    return Problem(given, problem.choices[tokens].to(device), problem.dy[tokens].to(device))


def step(problem: Problem, recipe: str, **how: Any) -> list[Tensor]:
    """y and the gradients of x, weights, w1 and w2."""
    y = moe_mlp(**problem.given, choices=problem.choices, recipe=recipe, seed=7, **how)
    return [y.detach(), *torch.autograd.grad(y, list(problem.given.values()), problem.dy)]


NAMES = ("y", "dx", "dweights", "dw1", "dw2")


def unlike(ours: list[Tensor], theirs: list[Tensor], what: str) -> list[str]:
    """What is not equal, bit for bit."""
    return [f"{what}: {name}" for name, a, b in zip(NAMES, ours, theirs, strict=True) if not torch.equal(a, b)]


def equal_to_one_gpu(recipes: list[str], seed: int, route: Any, static: bool) -> list[str]:
    """What differs from one GPU with all tokens and experts, for every form."""
    ranks, rank, found = dist.get_world_size(), dist.get_rank(), []
    device = f"cuda:{rank}"
    for number, recipe in enumerate(recipes):
        form = ("standard", "keep_all", "recompute", "lean")[number % 4]
        problem = draw(seed + number, ranks)
        whole = step(_all(problem, device), recipe, form=form)
        tokens, experts = slice(rank * T, (rank + 1) * T), slice(rank * E // ranks, (rank + 1) * E // ranks)
        expected = [value[tokens if index < 3 else experts] for index, value in enumerate(whole)]
        exchange = Exchange(rows=ranks * T * C, route=route) if static else None
        for again in range(2):
            mine = here(problem, rank, ranks, device)
            got = step(mine, recipe, form=form, ep=dist.group.WORLD, exchange=exchange)
            found += unlike(got, expected, f"{recipe}, {form}, call {again}")
    check_errors()
    return found


def _all(problem: Problem, device: str) -> Problem:
    """All tokens and experts on one device, as leaves."""
    given = {name: value.to(device).clone().requires_grad_() for name, value in problem.given.items()}
    return Problem(given, problem.choices.to(device), problem.dy.to(device))


def replays(recipe: str, seed: int, route: Any, returns: Any, payload: Any, count: int) -> list[str]:
    """One CUDA graph of forward and backward, replayed with other tokens, routings and weights: what differs from the
    same call without a graph, which comes after each of them."""
    ranks, rank, found = dist.get_world_size(), dist.get_rank(), []
    device = torch.device("cuda", rank)
    static = here(draw(seed, ranks), rank, ranks, f"cuda:{rank}")
    exchange = Exchange(rows=ranks * T * C, route=route, returns=returns, payload=payload)
    how = {"ep": dist.group.WORLD, "exchange": exchange}

    def run() -> list[Tensor]:
        return step(static, recipe, **how)

    graph, results = record_graph(run, device)
    generator = torch.Generator(device).manual_seed(seed + rank)
    for number in range(count):
        with torch.no_grad():
            for value in static.given.values():
                value.copy_(torch.randn(value.shape, generator=generator, device=device))
            static.dy.normal_(generator=generator)
            static.choices.copy_(torch.rand(T, E, generator=generator, device=device).argsort(1)[:, :C])
            static.choices[torch.rand(T, C, generator=generator, device=device) < 0.2] = -1
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        replayed = [result.clone() for result in results]
        found += unlike(replayed, run(), f"replay {number}")
    check_errors()
    del graph, results
    return found


def waits_in_vain(seconds: float) -> tuple[str, float]:
    """By peer memory, rank 1 does not come to a call that was agreed on before: the error here, and after how long."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    mine = here(draw(0, ranks), rank, ranks, f"cuda:{rank}")
    how = {"ep": group, "exchange": Exchange(rows=ranks * T * C, route="peer")}
    step(mine, "bf16", **how)
    torch.cuda.synchronize()
    start = time.monotonic()
    try:
        if rank != 1:
            step(mine, "bf16", **how)
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


def explained() -> tuple[str, str]:
    """The route that is taken without being asked for, and why."""
    group = dist.group.WORLD
    assert group is not None
    plan = explain_exchange("fp8-block", group, Exchange(rows=64))
    return plan.route, plan.reason
