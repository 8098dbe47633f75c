"""Expert MLPs in torch: drawn operands, and the calls that are timed."""

from __future__ import annotations

from collections.abc import Sequence
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
from octavo_bench.peers.peer import check_aligned
from octavo_torch.mlp.plan import MlpPlan

_SECOND_STREAM = 1 << 63


@dataclass(frozen=True)
class Experts:
    """Operands of experts (G, K, F, M) in bf16, and the copies that are rotated.

    sets    x [M, K], w1 [G, 2F, K], w2 [G, K, F] and probs [M] fp32 or None, leaves all; dy [M, K]
    """

    shape: Shape
    sizes: Tensor
    sets: tuple[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor], ...]
    host_sizes: tuple[int, ...]


def draw_experts(engine: TorchEngine, shape: Shape, sizes: Sequence[int], seed: int, *, probs: bool) -> Experts:
    """As many sets as it takes to be out of the device's cache."""
    groups, k, f, rows = shape.key
    copies = input_copies(2 * rows * k + 6 * groups * k * f, engine.cache_bytes) if engine.cache_bytes else 1
    sets = []
    for copy in range(copies):
        sides = ((rows, k), (groups, 2 * f, k), (groups, k, f), (rows, k))
        x, w1, w2, dy = (engine.normal(side, seed + 4 * copy + at) for at, side in enumerate(sides))
        weights = engine.normal((rows, 1), seed + 4 * copy).float().abs().view(-1).requires_grad_() if probs else None
        leaves = (x.requires_grad_(), w1.mul_(k**-0.5).requires_grad_(), w2.mul_(f**-0.5).requires_grad_())
        sets.append((*leaves, weights, dy))
    return Experts(shape, engine.array(list(sizes), "int64"), tuple(sets), tuple(sizes))


def plan_of(experts: Experts, kind: str, backend: Names) -> MlpPlan:
    """What `grouped_mlp` runs; NoBackendError where nothing serves it."""
    x, w1, w2, *_ = experts.sets[0]
    return octavo_torch.explain_mlp(x, w1, w2, experts.sizes, recipe=recipe_of(kind), backend=backend)


def _activated(h: Tensor, probs: Tensor | None) -> Tensor:
    gate, up = h.chunk(2, -1)
    a = silu(gate) * up
    return a if probs is None else a * probs[:, None].to(a.dtype)


def own_calls(experts: Experts) -> list[Call]:
    """torch's own grouped GEMM in bf16, its activation, and its grouped GEMM; gradients of all leaves."""
    check_aligned(experts.host_sizes, 8, "torch's wgrad")
    ends = torch.cumsum(experts.sizes, 0).to(torch.int32)

    def made(x: Tensor, w1: Tensor, w2: Tensor, probs: Tensor | None, dy: Tensor) -> Call:
        def call() -> Any:
            h = torch._grouped_mm(x, w1.transpose(1, 2), offs=ends)
            y = torch._grouped_mm(_activated(h, probs), w2.transpose(1, 2), offs=ends)
            return torch.autograd.grad(y, _leaves(x, w1, w2, probs), dy)

        return call

    return [made(*arrays) for arrays in experts.sets]


def torch_calls(experts: Experts, kind: str, backend: Names, *, fused: bool) -> list[Call]:
    """Octavo's, fused or in a row: calls that return the gradients of all leaves, one a set of buffers."""
    return [_call(arrays, experts.sizes, kind, backend, fused) for arrays in experts.sets]


def _call(arrays: tuple[Any, ...], sizes: Tensor, kind: str, backend: Names, fused: bool) -> Call:
    x, w1, w2, probs, dy = arrays
    recipe = recipe_of(kind)
    states: Any = (None, None)
    if isinstance(recipe, DelayedScaling):
        states = tuple(octavo_torch.DelayedState.create(recipe, len(sizes), x.device) for _ in range(2))
    seeds = (1, 1 ^ _SECOND_STREAM) if recipe.stochastic else (None, None)

    def forward() -> Tensor:
        if fused:
            state = states if states[0] is not None else None
            return octavo_torch.grouped_mlp(
                x, w1, w2, sizes, probs=probs, recipe=recipe, seed=seeds[0], state=state, backend=backend
            )
        how: dict[str, Any] = {"recipe": recipe, "backend": backend}
        h = octavo_torch.grouped_linear(x, w1, sizes, seed=seeds[0], state=states[0], **how)
        return octavo_torch.grouped_linear(_activated(h, probs), w2, sizes, seed=seeds[1], state=states[1], **how)

    def call() -> Any:
        gradients = torch.autograd.grad(forward(), _leaves(x, w1, w2, probs), dy)
        for state in states:
            if state is not None:
                state.update()
        return gradients

    return call


def _leaves(*leaves: Tensor | None) -> list[Tensor]:
    return [leaf for leaf in leaves if leaf is not None]
