"""Expert MLPs in torch: drawn operands, the calls that are timed, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor
from torch.nn.functional import silu

import octavo_torch
from octavo_bench.harness.engine.torch import TorchEngine
from octavo_bench.harness.options import Names
from octavo_bench.harness.problem import backends_of
from octavo_bench.harness.recipes import FRAMEWORK, recipe_of
from octavo_bench.harness.run import Run, problems
from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Call, Times, input_copies
from octavo_bench.mlp.benchmark import FUSED, IN_A_ROW, WAYS, MlpOptions, MlpRow, Way
from octavo_bench.peers.grouped_mm import check_aligned, ends_of, grouped
from octavo_bench.training.torch import delayed_states, gradients_call

_SECOND_STREAM = 1 << 63


def mlp_rows(run: Run[MlpOptions]) -> Iterator[MlpRow]:
    """torch's own, then each recipe both ways, in turns: one after the other they differ by what ran before."""
    options = run.options
    run.parts["probs"] = options.probs
    engine = TorchEngine(options.chosen_device)
    for shape, name, sizes in problems(run):
        experts = draw_experts(engine, shape, sizes, options.chosen_seed, probs=options.probs)
        if options.peers:
            own = partial(_own_row, engine, experts, name, options.chosen_repeats)
            yield from run.attempt(own, shape, name, FRAMEWORK, IN_A_ROW, "torch's own")
        for kind in options.chosen_kinds:
            times = cache(partial(_times, engine, experts, kind, options))
            for way in WAYS:
                make = partial(_row, experts, name, kind, way, options.chosen_backend, times)
                yield from run.attempt(make, shape, name, kind, way)
        del experts
        engine.release()


def _own_row(engine: TorchEngine, experts: Experts, name: str, repeats: int) -> MlpRow:
    return MlpRow(experts.shape, name, FRAMEWORK, IN_A_ROW, (), "", engine.times(own_calls(experts), repeats))


def _times(engine: TorchEngine, experts: Experts, kind: str, options: MlpOptions) -> dict[Way, Times]:
    calls = [mlp_calls(experts, kind, options.chosen_backend, fused=way == FUSED) for way in WAYS]
    return dict(zip(WAYS, engine.times_in_turns(calls, options.chosen_repeats), strict=True))


def _row(
    experts: Experts, name: str, kind: str, way: Way, backend: Names, times: Callable[[], dict[Way, Times]]
) -> MlpRow:
    x, w1, w2, *_ = experts.sets[0]
    plan = octavo_torch.explain_mlp(x, w1, w2, experts.sizes, recipe=recipe_of(kind), backend=backend)
    fused = "; ".join(f"{what} {part}" for what, part in plan.fused.items()) if way == FUSED else ""
    return MlpRow(experts.shape, name, kind, way, backends_of(plan.fc1.plan, plan.fc2.plan), fused, times()[way])


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
    sets = []
    for copy in range(input_copies(2 * rows * k + 6 * groups * k * f, engine.cache_bytes)):
        sides = ((rows, k), (groups, 2 * f, k), (groups, k, f), (rows, k))
        x, w1, w2, dy = (engine.normal(side, seed + 4 * copy + at) for at, side in enumerate(sides))
        weights = engine.normal((rows, 1), seed + 4 * copy).float().abs().view(-1).requires_grad_() if probs else None
        leaves = (x.requires_grad_(), w1.mul_(k**-0.5).requires_grad_(), w2.mul_(f**-0.5).requires_grad_())
        sets.append((*leaves, weights, dy))
    return Experts(shape, engine.array(list(sizes), "int64"), tuple(sets), tuple(sizes))


def _activated(h: Tensor, probs: Tensor | None) -> Tensor:
    gate, up = h.chunk(2, -1)
    a = silu(gate) * up
    return a if probs is None else a * probs[:, None].to(a.dtype)


def own_calls(experts: Experts) -> list[Call]:
    """torch's own grouped GEMM in bf16, its activation, and its grouped GEMM; gradients of all leaves."""
    check_aligned(experts.host_sizes)
    ends = ends_of(experts.sizes)

    def forward(x: Tensor, w1: Tensor, w2: Tensor, probs: Tensor | None) -> Tensor:
        return grouped(_activated(grouped(x, w1, ends), probs), w2, ends)

    return [gradients_call(partial(forward, *arrays[:4]), arrays[:4], arrays[4]) for arrays in experts.sets]


def mlp_calls(experts: Experts, kind: str, backend: Names, *, fused: bool) -> list[Call]:
    """Octavo's, fused or in a row: calls that return the gradients of all leaves, one per set of buffers."""
    return [_call(arrays, experts.sizes, kind, backend, fused) for arrays in experts.sets]


def _call(arrays: tuple[Any, ...], sizes: Tensor, kind: str, backend: Names, fused: bool) -> Call:
    x, w1, w2, probs, dy = arrays
    recipe = recipe_of(kind)
    states: Any = delayed_states(recipe, len(sizes), x.device, 2)
    seeds = (1, 1 ^ _SECOND_STREAM) if recipe.stochastic else (None, None)
    how: dict[str, Any] = {"recipe": recipe, "backend": backend}

    def together() -> Tensor:
        return octavo_torch.grouped_mlp(x, w1, w2, sizes, probs=probs, seed=seeds[0], state=states or None, **how)

    def in_a_row() -> Tensor:
        first, second = states or (None, None)
        h = octavo_torch.grouped_linear(x, w1, sizes, seed=seeds[0], state=first, **how)
        return octavo_torch.grouped_linear(_activated(h, probs), w2, sizes, seed=seeds[1], state=second, **how)

    return gradients_call(together if fused else in_a_row, (x, w1, w2, probs), dy, states)
