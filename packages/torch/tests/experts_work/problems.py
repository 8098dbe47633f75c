"""Tokens and experts of all ranks, what one rank has of them, and the run of a layer on either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from moe_layers import REFERENCE
from torch import Tensor

from octavo import DelayedScaling, Recipe
from octavo_torch import DelayedState, moe_mlp

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

    def anew(self) -> Problem:
        """The same, with leaves of its own."""
        given = {name: value.detach().clone().requires_grad_() for name, value in self.given.items()}
        return self._replace(given=given)


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
