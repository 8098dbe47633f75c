"""Grouped MLPs for the tests, and the same from single operations. Not tests."""

from __future__ import annotations

from typing import Any

import native_calls as native
import torch
from torch import Tensor

from octavo import QuantizerSpec, Recipe
from octavo_registry.contract.cards import GATED
from octavo_torch import DelayedState, grouped_linear, grouped_mlp

NAMES = ("x", "w1", "w2", "probs", "bias1", "bias2")
_CODED = QuantizerSpec(scaling="current", format="e4m3", orientation="rowwise")


def draw_mlp(
    shape: tuple[int, int, int, int, int],
    sizes: list[int],
    activation: str,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Leaves of an MLP [M, K], F, N in G groups, with NaN past the sum of the sizes."""
    rows, k, f, n, groups = shape
    inner = f * (2 if activation in GATED else 1)
    made = {
        "x": torch.randn(rows, k, device=device).to(dtype),
        "w1": (torch.randn(groups, inner, k, device=device) * k**-0.5).to(dtype),
        "w2": (torch.randn(groups, n, f, device=device) * f**-0.5).to(dtype),
        "probs": torch.rand(rows, device=device),
        "bias1": torch.randn(groups, inner, device=device).to(dtype),
        "bias2": torch.randn(groups, n, device=device).to(dtype),
    }
    used = sum(sizes)
    made["x"][used:] = torch.nan
    made["probs"][used:] = torch.nan
    return {name: value.requires_grad_() for name, value in made.items()}


def states_of(recipe: Recipe, groups: int, device: str = "cpu") -> tuple[DelayedState, DelayedState] | None:
    """Fresh states of both layers, whose scales all differ; None where the recipe keeps none."""
    if not recipe.stateful:
        return None
    first, second = (DelayedState.create(recipe, groups, device) for _ in range(2))  # type: ignore[arg-type]
    for number, state in enumerate((first, second)):
        state.scale.add_(torch.linspace(0, 1 + number, 3 * groups, device=device).view(3, groups))
    return first, second


class Activated(torch.autograd.Function):
    """The activation by this package's kernels, apart from what quantizes it, and the sums of its gradient, whose order
    is these kernels' (torch adds in another)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, bias: Tensor, probs: Tensor, sizes: Tensor, name: Any) -> Tensor:
        ctx.save_for_backward(h, probs, sizes)
        ctx.dtype = bias.dtype
        ctx.name = name
        made = native.act_quantize(h, _CODED, sizes, activation=name, probs=probs, activated=True).activated
        assert made is not None
        return made

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, probs, sizes = ctx.saved_tensors
        dy = dy.to(h.dtype)
        how: dict[str, Any] = {"activated": True, "dbias": True, "dprobs": True}
        made = native.dact_quantize(dy, h, _CODED, sizes, activation=ctx.name, probs=probs, **how)
        assert made.dbias is not None
        return made.activated, made.dbias.to(ctx.dtype), made.dprobs, None, None


def composed(
    given: dict[str, Tensor], sizes: Tensor, activation: str, recipe: Recipe, states: Any, seed: int
) -> Tensor:
    """grouped_mlp as grouped_linear, the activation rounded once, and grouped_linear."""
    first, second = states or (None, None)
    how: dict[str, Any] = {"recipe": recipe, "backend": "torch-native"}
    bias = given["bias1"]
    h = grouped_linear(given["x"], given["w1"], sizes, bias=bias.detach(), seed=seed, state=first, **how)
    a: Tensor = Activated.apply(h, bias, given["probs"], sizes, activation)  # type: ignore[no-untyped-call]
    later = seed ^ (1 << 63)
    return grouped_linear(a, given["w2"], sizes, bias=given["bias2"], seed=later, state=second, **how)


def results(
    function: Any, given: dict[str, Tensor], sizes: Tensor, activation: str, recipe: Recipe, dy: Tensor, seed: int
) -> dict[str, Tensor]:
    """y, every gradient and the amax histories of `function`, which is `fused` or `composed`."""
    states = states_of(recipe, len(sizes), dy.device.type)
    y = function(given, sizes, activation, recipe, states, seed)
    grads = torch.autograd.grad(y, [given[name] for name in NAMES], dy)
    made = {"y": y.detach()} | {f"d{name}": grad for name, grad in zip(NAMES, grads, strict=True)}
    for number, state in enumerate(states or ()):
        made[f"history {number + 1}"] = state.history
    return made


def fused(
    given: dict[str, Tensor], sizes: Tensor, activation: str, recipe: Recipe, states: Any, seed: int, **how: Any
) -> Tensor:
    """grouped_mlp."""
    return grouped_mlp(
        group_sizes=sizes, activation=activation, recipe=recipe, state=states, seed=seed, backend="torch-native",
        **given, **how,
    )  # fmt: skip


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: object = "") -> None:
    """The same bits by name."""
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), f"{what}: {name}"


def assert_without_rows(
    shape: tuple[int, int, int, int, int], activation: str, recipe: Recipe, device: str = "cpu"
) -> None:
    """An MLP of no rows has results of no rows, and gradients of its parameters that are exactly zero."""
    _, k, f, n, groups = shape
    given = draw_mlp((0, k, f, n, groups), [0] * groups, activation, device=device)
    sizes = torch.zeros(groups, dtype=torch.int64, device=device)
    dy = torch.empty(0, n, device=device, dtype=torch.bfloat16)
    made = results(fused, given, sizes, activation, recipe, dy, 12345)
    assert [tuple(made[name].shape) for name in ("y", "dx", "dprobs")] == [(0, n), (0, k), (0,)]
    assert not any(made[f"d{name}"].any() for name in ("w1", "w2", "bias1", "bias2"))
