"""The operands of a Mixture-of-Experts layer in torch, and who serves it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import octavo_torch
from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.options import Names
from octavo_bench.harness.problem import backends_of
from octavo_bench.harness.recipes import recipe_of
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import input_copies

_FAR = 16.0  # between the logits of chosen experts and the others


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
        """Whose gradients are taken."""
        return self.x, self.router, self.w1, self.w2


@dataclass(frozen=True)
class Layer:
    """Experts (G, K, F, M), of which each of T = M / k tokens chooses k, and the copies that are rotated."""

    shape: Shape
    choices: int
    sets: tuple[Operands, ...]

    def even_choices(self) -> Tensor:
        """Experts [T, k] of each token, by which every expert gets the same number of tokens."""
        return _even_choices(self.shape, self.choices, self.sets[0].x.device)


def draw_layer(engine: TorchEngine, shape: Shape, choices: int, seed: int) -> Layer:
    """As many sets as it takes to be out of the device's cache."""
    groups, k, f, rows = shape.key
    tokens = rows // choices
    chosen = _even_choices(shape, choices, engine.device)
    balance = torch.zeros(tokens, groups, device=engine.device).scatter_(1, chosen, _FAR)
    sets = []
    for copy in range(input_copies(2 * tokens * k + 6 * groups * k * f, engine.cache_bytes)):
        sides = ((tokens, k), (groups, k), (groups, 2 * f, k), (groups, k, f), (tokens, k))
        x, router, w1, w2, dy = (engine.normal(side, seed + 5 * copy + at) for at, side in enumerate(sides))
        for leaf, width in ((x, 1), (router, k), (w1, k), (w2, f)):
            leaf.mul_(width**-0.5).requires_grad_()
        sets.append(Operands(x, router, w1, w2, balance, dy))
    return Layer(shape, choices, tuple(sets))


def _even_choices(shape: Shape, choices: int, device: torch.device | str) -> Tensor:
    return torch.arange(shape.rows, device=device).view(-1, choices) % shape.groups


def layer_backends(layer: Layer, kind: str, backend: Names) -> tuple[str, ...]:
    """Who serves the experts; NoBackendError where nobody does."""
    operands, rows = layer.sets[0], layer.shape.rows
    x = operands.x.new_empty((rows, layer.shape.k)).requires_grad_()
    sizes = torch.zeros(layer.shape.groups, dtype=torch.int64, device=x.device)
    plan = octavo_torch.explain_mlp(x, operands.w1, operands.w2, sizes, recipe=recipe_of(kind), backend=backend)
    return backends_of(plan.fc1.plan, plan.fc2.plan)
