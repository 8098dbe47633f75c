"""A Mixture-of-Experts layer in torch: drawn operands, and the calls that are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

import octavo_torch
from octavo import DelayedScaling
from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.problem import Names
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Call, input_copies
from octavo_bench.moe.row import ADDED, GATHERED
from octavo_bench.peers.peer import check_aligned
from octavo_torch.mlp.plan import MlpPlan

_FAR = 16.0  # between the logits of chosen experts and the others

Forward = Callable[["Operands"], Tensor]


@dataclass(frozen=True)
class Operands:
    """One set of buffers in bf16: x [T, K], router [G, K], w1 [G, 2F, K], w2 [G, K, F], leaves all; dy [T, K].

    balance   fp32 [T, G], added to the router's logits: every expert gets the same number of tokens
    """

    x: Tensor
    router: Tensor
    w1: Tensor
    w2: Tensor
    balance: Tensor
    dy: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Whose gradients are wanted."""
        return self.x, self.router, self.w1, self.w2


@dataclass(frozen=True)
class Layer:
    """Experts (G, K, F, M), of which each of T = M / k tokens chooses k, and the copies that are rotated."""

    shape: Shape
    choices: int
    sets: tuple[Operands, ...]


def draw_layer(engine: TorchEngine, shape: Shape, choices: int, seed: int) -> Layer:
    """As many sets as it takes to be out of the device's cache."""
    groups, k, f, rows = shape.key
    tokens = rows // choices
    copies = input_copies(2 * tokens * k + 6 * groups * k * f, engine.cache_bytes) if engine.cache_bytes else 1
    chosen = torch.arange(tokens * choices, device=engine.device).view(tokens, choices) % groups
    balance = torch.zeros(tokens, groups, device=engine.device).scatter_(1, chosen, _FAR)
    sets = []
    for copy in range(copies):
        sides = ((tokens, k), (groups, k), (groups, 2 * f, k), (groups, k, f), (tokens, k))
        x, router, w1, w2, dy = (engine.normal(side, seed + 5 * copy + at) for at, side in enumerate(sides))
        for leaf, width in ((x, 1), (router, k), (w1, k), (w2, f)):
            leaf.mul_(width**-0.5).requires_grad_()
        sets.append(Operands(x, router, w1, w2, balance, dy))
    return Layer(shape, choices, tuple(sets))


def route(held: Operands, choices: int) -> tuple[Tensor, Tensor]:
    """Experts [T, k] of each token and their weights [T, k] fp32, which sum to 1."""
    logits = (held.x @ held.router.T).float() + held.balance
    weights, index = torch.softmax(logits, -1).topk(choices, dim=-1)
    return index, weights / weights.sum(-1, keepdim=True)


def plan_of(layer: Layer, kind: str, backend: Names) -> MlpPlan:
    """What `grouped_mlp` runs; NoBackendError where nothing serves it."""
    held, rows = layer.sets[0], layer.shape.rows
    x = held.x.new_empty((rows, layer.shape.k)).requires_grad_()
    sizes = torch.zeros(layer.shape.groups, dtype=torch.int64, device=x.device)
    return octavo_torch.explain_mlp(x, held.w1, held.w2, sizes, recipe=recipe_of(kind), backend=backend)


def own_calls(layer: Layer, way: str) -> list[Call]:
    """torch's grouped GEMM in bf16 between index_select and what brings the rows back; gradients of all leaves."""
    groups, _, _, rows = layer.shape.key
    check_aligned([rows // groups], 8, "torch's wgrad")
    experts = torch.arange(groups, device=layer.sets[0].x.device)

    def forward(held: Operands) -> Tensor:
        index, weights = route(held, layer.choices)
        flat = index.view(-1)
        order = torch.argsort(flat, stable=True)
        ends = torch.searchsorted(flat[order], experts, right=True, out_int32=True)
        tokens = order // layer.choices
        h = torch._grouped_mm(held.x.index_select(0, tokens), held.w1.transpose(1, 2), offs=ends)
        gate, up = h.chunk(2, -1)
        a = silu(gate) * up * weights.view(-1)[order][:, None].to(h.dtype)
        y = torch._grouped_mm(a, held.w2.transpose(1, 2), offs=ends)
        if way == ADDED:
            return torch.zeros_like(held.x).index_add(0, tokens, y)
        assert way == GATHERED
        back = torch.empty_like(order).scatter_(0, order, torch.arange(rows, device=order.device))
        return y.index_select(0, back).view(-1, layer.choices, y.shape[1]).sum(1)

    return [_call(held, forward, lambda: None) for held in layer.sets]


def torch_calls(layer: Layer, kind: str, backend: Names) -> list[Call]:
    """`permute`, `grouped_mlp` and `unpermute`: calls that return the gradients of all leaves."""
    recipe, groups = recipe_of(kind), layer.shape.groups
    state: Any = None
    if isinstance(recipe, DelayedScaling):
        device = layer.sets[0].x.device
        state = tuple(octavo_torch.DelayedState.create(recipe, groups, device) for _ in range(2))
    how: dict[str, Any] = {"recipe": recipe, "backend": backend, "state": state}
    if recipe.stochastic:
        how["seed"] = 1

    def forward(held: Operands) -> Tensor:
        index, weights = route(held, layer.choices)
        rows, sizes, routing = octavo_torch.permute(held.x, index, groups, backend=backend)
        probs = routing.to_rows(weights, backend=backend)
        y = octavo_torch.grouped_mlp(rows, held.w1, held.w2, sizes, probs=probs, **how)
        return octavo_torch.unpermute(y, routing, backend=backend)

    def after() -> None:
        for one in state or ():
            one.update()

    return [_call(held, forward, after) for held in layer.sets]


def _call(held: Operands, forward: Forward, after: Callable[[], None]) -> Call:
    def call() -> Any:
        gradients = torch.autograd.grad(forward(held), held.leaves, held.dy)
        after()
        return gradients

    return call
