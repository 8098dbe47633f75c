"""What ranks do in the tests of experts that are spread over them: importable by name, as other processes run it."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from moe_layers import RECIPES, REFERENCE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import octavo_numerics
from octavo import DelayedScaling, Recipe
from octavo_torch import (
    DelayedState,
    Exchange,
    ExchangeError,
    GroupedMLP,
    MoE,
    MoeShape,
    RowsLeftOutError,
    bytes_exchanged,
    check_errors,
    dequantize,
    explain_exchange,
    moe_mlp,
    quantize,
    update_scales,
)
from octavo_torch.bridge import BRIDGE
from octavo_torch.moe.parallel import group as parallel_group
from octavo_torch.moe.parallel.carriers import peer
from octavo_torch.moe.parallel.options import payload_spec

E, C, K, F, N = 8, 3, 64, 48, 80
"""Experts of all ranks, choices, and sides."""

_groups: dict[int, list[dist.ProcessGroup]] = {}


def group_of(size: int) -> tuple[dist.ProcessGroup, int]:
    """This rank's group of so many ranks, all of which work at once; and the number of the group."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if size not in _groups:
        starts = range(0, world, size)
        _groups[size] = [dist.new_group([*range(first, first + size)]) for first in starts]
    return _groups[size][rank // size], rank // size


class Problem(NamedTuple):
    """Tokens of all ranks, one rank's after another's, with experts; `counts` of each rank."""

    given: dict[str, Tensor]
    choices: Tensor
    dy: Tensor
    counts: list[int]

    def mine(self, rank: int, ranks: int) -> Problem:
        """A rank's tokens and experts, as leaves of their own."""
        first = sum(self.counts[:rank])
        tokens, experts = slice(first, first + self.counts[rank]), slice(rank * E // ranks, (rank + 1) * E // ranks)
        given = {
            name: value.detach()[tokens if name in ("x", "weights") else experts].clone().requires_grad_()
            for name, value in self.given.items()
        }
        return Problem(given, self.choices[tokens], self.dy[tokens], [self.counts[rank]])


def draw(seed: int, counts: list[int], routing: str, biased: bool = False) -> Problem:
    """routing: "random", with choices that go nowhere; "one", all on one expert; "few", experts without tokens."""
    torch.manual_seed(seed)
    tokens = sum(counts)
    choices = torch.rand(tokens, E).argsort(1)[:, :C]
    if routing == "random":
        choices[torch.rand(choices.shape) < 0.2] = int(torch.tensor([-1, E, 1000])[seed % 3])
    elif routing == "one":
        choices = torch.where(torch.arange(C) == 0, seed % E, -1).expand(tokens, C).clone()
    else:
        choices = choices // 4 * 4 + 2
        choices = torch.where(choices == choices[:, :1], choices, -1)
        choices[:, 0] = 2
    given = {
        "x": torch.randn(tokens, K).bfloat16(),
        "weights": torch.rand(tokens, C),
        "w1": (torch.randn(E, 2 * F, K) / 8).bfloat16(),
        "w2": (torch.randn(E, N, F) / 8).bfloat16(),
    }
    if biased:
        given |= {"bias1": torch.randn(E, 2 * F).bfloat16(), "bias2": torch.randn(E, N).bfloat16()}
    leaves = {name: value.requires_grad_() for name, value in given.items()}
    return Problem(leaves, choices, torch.randn(tokens, N).bfloat16(), counts)


class Run(NamedTuple):
    """y, gradients by the names of operands, and the states of delayed scaling after it."""

    y: Tensor
    grads: dict[str, Tensor]
    states: tuple[DelayedState, DelayedState] | None


def states_of(recipe: Recipe, experts: slice, seed: int) -> tuple[DelayedState, DelayedState] | None:
    if not isinstance(recipe, DelayedScaling):
        return None
    draw_scales = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(2):
        scales = torch.rand(3, E, generator=draw_scales) + 0.5
        state = DelayedState.create(recipe, len(range(E)[experts]))
        state.scale.copy_(scales[:, experts])
        made.append(state)
    return made[0], made[1]


def run(problem: Problem, recipe: Recipe, states: Any = None, **how: Any) -> Run:
    """Forward and backward of everything."""
    y = moe_mlp(**problem.given, choices=problem.choices, recipe=recipe, state=states, seed=7, backend=REFERENCE, **how)
    y.backward(problem.dy)
    grads = {name: value.grad for name, value in problem.given.items() if value.grad is not None}
    return Run(y.detach(), grads, states)


def decoded(values: Tensor, payload: Recipe, operand: Any) -> Tensor:
    """What arrives of tokens that travel as codes."""
    with torch.no_grad():
        codes = quantize(values, payload_spec(payload, operand), backend=REFERENCE)
        return dequantize(codes, dtype=values.dtype, backend=REFERENCE)


def differences(spread: Run, whole: Run, counts: list[int], rank: int, ranks: int) -> Iterator[str]:
    """What is not equal, bit for bit."""
    first = sum(counts[:rank])
    tokens, experts = slice(first, first + counts[rank]), slice(rank * E // ranks, (rank + 1) * E // ranks)
    pairs = {"y": (spread.y, whole.y[tokens])}
    for name, grad in whole.grads.items():
        pairs[f"d{name}"] = spread.grads[name], grad[tokens if name in ("x", "weights") else experts]
    for number in range(2):
        if whole.states is not None and spread.states is not None:
            of_all, own = whole.states[number].history, spread.states[number].history
            pairs[f"history {number}"] = own, of_all[..., experts]
    for name, (ours, theirs) in pairs.items():
        if ours.dtype is not theirs.dtype or not torch.equal(ours, theirs):
            yield name


ROUTINGS = {"random": [11, 0, 7, 14], "one": [5, 9, 0, 3], "few": [6, 6, 6, 6]}
"""Routings, and the tokens of each rank."""


def rows_of(problem: Problem, ranks: int) -> tuple[int, int]:
    """The most rows that a rank's experts get, and that one rank has at another: what static buffers have to hold."""
    owner = torch.where((problem.choices >= 0) & (problem.choices < E), problem.choices // (E // ranks), ranks)
    per_pair = [one.flatten().bincount(minlength=ranks + 1)[:ranks] for one in owner.split(problem.counts)]
    table = torch.stack(per_pair)
    return max(int(table.sum(0).max()), 1), max(int(table.max()), 1)


def shared(group: dist.ProcessGroup, works: list[Callable[[], Run]]) -> list[Run]:
    """What each of them returns, which each rank works out for some of them and all ranks are given."""
    mine = [work() for work in works[group.rank() :: group.size()]]
    gathered: list[list[Run]] = [[]] * group.size()
    dist.all_gather_object(gathered, mine, group)
    return [gathered[number % group.size()][number // group.size()] for number in range(len(works))]


def equal_to_one_process(ranks: int, recipes: list[str], seed: int, *exchange: str) -> list[str]:
    """What differs from one process with all tokens, over every recipe and routing; "static" with buffers that are as
    small as they can be, "peer" with those in memory of all ranks."""
    group, number = group_of(ranks)
    me = group.rank()
    own = slice(me * E // ranks, (me + 1) * E // ranks)
    cases, works, found = [], [], []
    for recipe_number, name in enumerate(recipes):
        recipe = RECIPES[name]
        for routing, counts in ROUTINGS.items():
            form = ("standard", "keep_all", "recompute", "lean")[(recipe_number + len(routing)) % 4]
            counts = [6] * ranks if "static" in exchange else counts[:ranks]
            problem = draw(seed + 10 * recipe_number + number, counts, routing, biased=routing == "one")
            how = {"form": form, "weight_codes": ("keep", "remake")[recipe_number % 2]}
            works.append(partial(run, problem, recipe, states_of(recipe, slice(None), seed), **how))
            cases.append((f"{name}, {routing}, {form}", problem, recipe, how))
    for (case, problem, recipe, how), whole in zip(cases, shared(group, works), strict=True):
        options: dict[str, Any] = {}
        if exchange:
            options = dict(zip(("rows", "pair_rows"), rows_of(problem, ranks), strict=True))
            options["route"] = "peer" if "peer" in exchange else "collective"
        mine = problem.mine(me, ranks)
        spread = run(mine, recipe, states_of(recipe, own, seed), ep=group, exchange=Exchange(**options), **how)
        found += [f"{case}: {each}" for each in differences(spread, whole, problem.counts, me, ranks)]
    return found


def travels_as_codes(ranks: int, seed: int) -> list[str]:
    """What differs where tokens and dy travel as codes of the recipe, whose scales are powers of two.

    y, dx and the choices' weights: from one process; weights' gradients: from one process of what codes stand for.
    """
    group, number = group_of(ranks)
    me = group.rank()
    found = []
    for recipe_number, name in enumerate(("fp8-block", "mxfp8", "fp8-row")):
        recipe = RECIPES[name]
        counts = ROUTINGS["random"][:ranks]
        problem = draw(seed + recipe_number + number, counts, "random")
        mine = problem.mine(me, ranks)
        whole = run(problem, recipe)
        again = Problem(
            {each: value.detach().clone().requires_grad_() for each, value in problem.given.items()},
            problem.choices, decoded(problem.dy, recipe, "dy"), counts,
        )  # fmt: skip
        with torch.no_grad():
            again.given["x"].copy_(decoded(problem.given["x"], recipe, "x"))
        of_codes = run(again, recipe)
        spread = run(mine, recipe, ep=group, exchange=Exchange(payload=recipe))
        exact = {"y", "dx", "dweights"}
        found += [f"{name}: {each}" for each in differences(spread, whole, counts, me, ranks) if each in exact]
        found += [f"{name} of codes: {each}" for each in differences(spread, of_codes, counts, me, ranks)]
    return found


def sums_and_their_bound(ranks: int, seed: int) -> list[float]:
    """The largest error of y and of dx over its bound, with one partial sum per rank; and of y as rows."""
    group, number = group_of(ranks)
    me = group.rank()
    counts = ROUTINGS["random"][:ranks]
    problem = draw(seed + number, counts, "random")
    mine = problem.mine(me, ranks)
    recipe = RECIPES["fp8-block"]
    rows = []
    for choice in range(C):  # alone, a choice's row is the result
        one = mine.choices.where(torch.arange(C) == choice, -1)
        alone = Problem({name: v.detach().clone().requires_grad_() for name, v in mine.given.items()}, one, mine.dy, [])
        made = run(alone, recipe, ep=group)
        rows.append((made.y, made.grads["x"]))
    experts = E // ranks
    owner = torch.where((mine.choices >= 0) & (mine.choices < E), mine.choices // experts, -1).numpy()
    worst = []
    for returns in ("sums", "rows"):
        leaves = {name: value.detach().clone().requires_grad_() for name, value in mine.given.items()}
        made = run(mine._replace(given=leaves), recipe, ep=group, exchange=Exchange(returns=returns))
        for result, parts in zip((made.y, made.grads["x"]), zip(*rows, strict=True), strict=True):
            of_choices = BRIDGE.to_numpy(torch.stack(parts, 1))
            bound = octavo_numerics.partial_sums_bound(of_choices, owner)
            wide = np.where((owner >= 0)[:, :, None], of_choices.astype(np.float64), 0).sum(1)
            error = np.abs(BRIDGE.to_numpy(result).astype(np.float64) - wide)
            worst.append(float((error / bound).max(initial=0.0)))
    return worst


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
                leaves = {name: value.detach().clone().requires_grad_() for name, value in mine.given.items()}
                try:
                    run(mine._replace(given=leaves), RECIPES["mxfp8"], ep=group, exchange=exchange)
                finally:
                    dist.all_to_all_single = _all_to_all_single
                planes = 1 if payload is None else 2
                order = [("signatures", 1), ("tokens", planes), ("choices", 1), ("y", 1), ("dy", planes), ("dx", 1),
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
    # forward's quantizer alone: the engine runs backward without the mode that sees a CPU tensor's methods
    coded = len(BRIDGE.host_reads(lambda: decoded(problem.dy, recipe, "x")))
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


def trains(ranks: int) -> list[str]:
    """Two steps of a MoE module with delayed scaling and one of its own over ranks: what differs."""
    group, _ = group_of(ranks)
    me, found, recipe = group.rank(), [], DelayedScaling(history=3)
    torch.manual_seed(5)
    whole = MoE(E, K, F, C, N, bias=True, recipe=recipe, dtype=torch.bfloat16, seed=1, backend=REFERENCE)
    mesh = DeviceMesh.from_group(group, "cpu")
    mine = copy.deepcopy(
        MoE(E, K, F, C, N, bias=True, recipe=recipe, dtype=torch.bfloat16, seed=1, backend=REFERENCE, ep=mesh)
    )
    experts = slice(me * E // ranks, (me + 1) * E // ranks)
    with torch.no_grad():
        for name, parameter in mine.named_parameters():
            of_all = whole.get_parameter(name)
            parameter.copy_(of_all if name == "router" else of_all[experts])
    if f"rank={me} of {ranks}" not in repr(mine):
        found.append(repr(mine))
    counts = [7, 0, 5, 4][:ranks]
    first, tokens = sum(counts[:me]), counts[me]
    for step in range(2):
        x = torch.randn(sum(counts), K, generator=torch.Generator().manual_seed(step)).bfloat16() * 4**step
        mine.zero_grad()
        whole.zero_grad()
        y, all_y = mine(x[first : first + tokens]), whole(x)
        y.float().square().sum().backward()
        all_y.float().square().sum().backward()
        if not torch.equal(y, all_y[first : first + tokens]):
            found.append(f"y of step {step}")
        update_scales(mine)
        update_scales(whole)
    named = ("weight1", "weight2", "bias1", "bias2")
    grads = {name: (mine.get_parameter(name).grad, whole.get_parameter(name).grad[experts]) for name in named}
    found += [name for name, (ours, theirs) in grads.items() if not torch.equal(ours, theirs)]
    if not torch.equal(mine.encode_scale, whole.encode_scale[..., experts]):
        found.append("encode_scale")
    return [*found, *_not_summed("router", mine.router, whole.router, group)]


def layers_share_memory(seed: int) -> list[str]:
    """Two layers of other sides, of which the second needs more peer memory, one after the other, in two microbatches
    whose backwards come last to first; and a forward without gradients in between: what differs from collectives."""
    group, found = dist.group.WORLD, []
    assert group is not None
    results: dict[str, list[Tensor]] = {}
    peer._GRANULE = 1 << 12  # these layers are small
    for route in ("collective", "peer"):
        torch.manual_seed(seed)
        exchange = Exchange(rows=6 * C * group.size(), route=route)  # type: ignore[arg-type]
        if explain_exchange("mxfp8", group, exchange).route != route:
            found.append(f"explained as another route than {route}")
        how: dict[str, Any] = {"dtype": torch.bfloat16, "backend": REFERENCE, "ep": group, "exchange": exchange}
        layers = MoE(E, K, F, C, N, recipe="mxfp8", **how), MoE(E, N, 3 * F, C, K, recipe="fp8-block", **how)
        batches = [torch.randn(6, K).bfloat16().requires_grad_() for _ in range(2)]
        values: list[Tensor] = []
        for x in batches:
            values.append(layers[1](layers[0](x)))
            with torch.no_grad():
                values.append(layers[1](layers[0](x)))
        for y in values[-2::-2]:
            y.float().square().sum().backward()
        values += [x.grad for x in batches if x.grad is not None]
        values += [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]
        results[route] = values
    for number, (ours, theirs) in enumerate(zip(results["peer"], results["collective"], strict=True)):
        if not torch.equal(ours, theirs):
            found.append(f"value {number}")
    return found if len(results["peer"]) == 4 + 2 + 6 else [*found, f"{len(results['peer'])} values"]


def _not_summed(name: str, mine: nn.Parameter, whole: nn.Parameter, group: dist.ProcessGroup) -> Iterator[str]:
    """`name`, where gradients of a parameter that ranks share do not add up to that of one process."""
    assert mine.grad is not None
    assert whole.grad is not None
    total, of_all = mine.grad.float(), whole.grad.float()
    magnitude = total.abs()
    dist.all_reduce(total, group=group)
    dist.all_reduce(magnitude, group=group)
    # each rank's is rounded to bf16 once, and so is that of all; fp32's own roundings are 2^-16 of that
    if not bool(((total - of_all).abs() <= 1.001 * 2**-8 * (magnitude + of_all.abs())).all()):
        yield f"the gradients of {name}"


class WithSharedExpert(nn.Module):
    """Routed experts, over ranks where `ep` is given, and one that every token passes where it is.

    The shared one computes in small integers, whose sums are exact in any order and so do not depend on how many tokens
    a rank has.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.routed = MoE(E, K, F, C, recipe="mxfp8", dtype=torch.bfloat16, backend=REFERENCE, **how)
        self.shared = GroupedMLP(1, K, F, activation="relu2", recipe=None, dtype=torch.bfloat16, backend=REFERENCE)
        with torch.no_grad():
            for weight in self.shared.parameters():
                weight.copy_(small_integers(*weight.shape))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        return self.routed(x) + self.shared(x, torch.full((1,), x.shape[0], dtype=torch.int64))


def small_integers(*sides: int) -> Tensor:
    """-1, 0 and 1."""
    return torch.randint(-1, 2, sides).bfloat16()


def shares_an_expert(ranks: int, seed: int) -> list[str]:
    """A shared expert beside experts over ranks, with sizes that are read and static buffers: what differs from one
    process."""
    group, number = group_of(ranks)
    me, found = group.rank(), []
    experts = slice(me * E // ranks, (me + 1) * E // ranks)
    for exchange, counts in ((Exchange(), [7, 0, 5, 4][:ranks]), (Exchange(rows=6 * C * ranks), [6] * ranks)):
        torch.manual_seed(seed + number)
        whole, mine = WithSharedExpert(), WithSharedExpert(ep=group, exchange=exchange)
        with torch.no_grad():
            for name, parameter in mine.named_parameters():
                of_all = whole.get_parameter(name)
                parameter.copy_(of_all if parameter.shape == of_all.shape else of_all[experts])
        own = slice(sum(counts[:me]), sum(counts[: me + 1]))
        x, dy = small_integers(sum(counts), K), small_integers(sum(counts), K)
        here, there = x[own].clone().requires_grad_(), x.clone().requires_grad_()
        y, all_y = mine(here), whole(there)
        y.backward(dy[own])
        all_y.backward(dy)
        pairs = {"y": (y, all_y[own]), "dx": (here.grad, there.grad[own])}  # type: ignore[index]
        for name in ("weight1", "weight2"):
            routed = mine.routed.get_parameter(name).grad, whole.routed.get_parameter(name).grad[experts]
            pairs[f"the routed experts' {name}"] = routed
            found += _not_summed(f"shared {name}", *(each.shared.get_parameter(name) for each in (mine, whole)), group)
        found += [name for name, (ours, theirs) in pairs.items() if not torch.equal(ours, theirs)]
    return found


# ---- what fails


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
