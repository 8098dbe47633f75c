"""Only the gradients that a backward asks for are computed, and none twice: slots, inputs, second derivatives."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from octavo import MXFP8, NVFP4, CurrentScaling, HighPrecision, Recipe
from octavo_torch import Activation, GroupedLinear, GroupedMLP, Sequential, activate, grouped_linear, grouped_mlp
from octavo_torch.arithmetic import operators
from octavo_torch.dispatch.layers import layer_for

SIZES = torch.tensor([20, 0, 40])
M, K, F, N, G = 70, 32, 24, 16, len(SIZES)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each operation runs, quantizers by what they quantize."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> None:
        function = getattr(operators, name)

        def call(*args: Any) -> Any:
            counts[f"{name} {args[4]}" if name == "quantize_planes" else name] += 1
            return function(*args)

        monkeypatch.setattr(operators, name, call)

    for name in ("fprop", "dgrad", "wgrad", "bias_grads", "quantize_planes"):
        counted(name)
    return counts


def linear() -> tuple[dict[str, Tensor], Any]:
    given = {
        "x": torch.randn(M, K),
        "weight": torch.randn(G, N, K),
        "bias": torch.randn(G, N),
        "bias_scales": torch.randn(M),
    }
    return {name: value.requires_grad_() for name, value in given.items()}, grouped_linear


def mlp() -> tuple[dict[str, Tensor], Any]:
    given = {
        "x": torch.randn(M, K),
        "w1": torch.randn(G, 2 * F, K),
        "w2": torch.randn(G, N, F),
        "probs": torch.rand(M),
        "bias1": torch.randn(G, 2 * F),
        "bias2": torch.randn(G, N),
        "bias2_scales": torch.rand(M),
    }
    return {name: value.requires_grad_() for name, value in given.items()}, grouped_mlp


NEEDED = {
    "x": {"dgrad"},
    "weight": {"wgrad"},
    "bias": {"bias_grads"},
    "bias_scales": {"bias_grads"},
    "w1": {"dgrad", "wgrad"},
    "w2": {"wgrad"},
    "probs": {"dgrad"},
    "bias1": {"dgrad", "bias_grads"},
    "bias2": {"bias_grads"},
    "bias2_scales": {"bias_grads"},
}


@pytest.mark.parametrize("make", [linear, mlp])
def test_a_backward_of_some_inputs_runs_what_these_need(
    make: Any, calls: Counter[str], rng: np.random.Generator
) -> None:
    """Everything requires a gradient and torch.autograd.grad asks for one: no GEMM and no quantizer runs for another;
    dgrad first and wgrad later, as pipelines have it, are each the whole's bits."""
    given, function = make()
    dy = torch.randn(M, N)
    y = function(**given, group_sizes=SIZES, recipe=MXFP8())
    every = torch.autograd.grad(y, list(given.values()), dy, retain_graph=True)
    for (name, leaf), expected in zip(given.items(), every, strict=True):
        calls.clear()
        (grad,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
        assert torch.equal(grad, expected)
        assert {op for op in calls if not op.startswith("quantize")} == NEEDED[name]
        gemms = bool(NEEDED[name] - {"bias_grads"})
        assert bool(calls["quantize_planes dy"]) == gemms
        calls.clear()
        y.backward(dy, inputs=[leaf], retain_graph=True)
        assert {op for op in calls if not op.startswith("quantize")} == NEEDED[name]
    calls.clear()
    y.backward(dy)
    layers = 1 if make is linear else 2
    assert (calls["dgrad"], calls["wgrad"], calls["quantize_planes dy"]) == (layers, layers, layers)


SLOTS = [
    dict(zip(("fprop", "dgrad", "wgrad"), slots, strict=True))
    for slots in product(("quantized", "high_precision"), repeat=3)
]


@pytest.mark.parametrize("kind", [MXFP8, CurrentScaling])
@pytest.mark.parametrize("slots", SLOTS, ids=lambda slots: "".join(value[0] for value in slots.values()))
def test_slots_of_each_gemm(kind: type[Recipe], slots: dict[str, Any], rng: np.random.Generator) -> None:
    """Each GEMM has the bits of the recipe that its slot names: all quantized, or HighPrecision."""
    given, _ = linear()
    leaves = list(given.values())
    dy = torch.randn(M, N)
    call: dict[str, Any] = {"group_sizes": SIZES, **given}

    def made(recipe: Recipe) -> list[Tensor]:
        y = grouped_linear(recipe=recipe, **call)
        return [y, *torch.autograd.grad(y, leaves[:2], dy)]

    whole = {"quantized": made(kind()), "high_precision": made(HighPrecision())}
    for index, (gemm, value) in enumerate(zip(slots, made(kind(**slots)), strict=True)):
        assert torch.equal(value, whole[slots[gemm]][index]), gemm


@pytest.mark.parametrize(
    ("need_dx", "need_dw", "planes"),
    [
        (False, False, {"x": "rowwise", "w": "rowwise"}),
        (True, False, {"x": "rowwise", "w": "both", "dy": "rowwise"}),
        (False, True, {"x": "both", "w": "rowwise", "dy": "columnwise"}),
        (True, True, {"x": "both", "w": "both", "dy": "both"}),
    ],
)
def test_planes_that_no_gemm_reads_are_not_computed(need_dx: bool, need_dw: bool, planes: dict[str, str]) -> None:
    """Quantizing is a pass over memory: a frozen weight, or an input without a gradient, costs none that is unread."""
    x, w = torch.zeros(4, 32), torch.zeros(2, 32, 32)
    layer = layer_for(MXFP8(), x, w, True, need_dx, need_dw, "torch-reference")
    assert {name: plan.request.quantizer.orientation for name, plan in layer.quantizers.items()} == planes


def twice(y: Tensor, x: Tensor) -> None:
    # y's gradient is a constant here, and dx depends on the weights all the same
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (dx.square().sum() + y.sum()).backward()


def test_no_second_derivative_of_anything(rng: np.random.Generator) -> None:
    """A gradient penalty raises a sentence for every function and module, where y's gradient is a constant, too, and
    already where the graph of the gradients is asked for."""
    x = torch.randn(M, K).requires_grad_()
    wide = torch.randn(M, 2 * F).requires_grad_()
    given, function = mlp()
    modules: list[nn.Module] = [
        GroupedLinear(G, K, N, bias=True),
        GroupedLinear(G, K, N, recipe=NVFP4(), per_group_parameters=True),
        GroupedMLP(G, K, F, N, recipe=MXFP8(), interleave=2),
        Sequential(GroupedLinear(G, K, 2 * F), Activation(), GroupedLinear(G, F, N)),
    ]
    results = [
        *((module(x, SIZES), x) for module in modules),
        (grouped_linear(x, torch.randn(G, N, K), SIZES, recipe=None), x),
        (function(**given, group_sizes=SIZES, recipe=None), given["x"]),
        (activate(wide, "swiglu"), wide),
        (Activation("geglu")(wide), wide),
    ]
    for y, leaf in results:
        with pytest.raises(NotImplementedError, match="a grouped layer has no second derivative"):
            twice(y, leaf)
        with pytest.raises(NotImplementedError, match="a grouped layer has no second derivative"):
            torch.autograd.grad(y.sum(), leaf, create_graph=True)  # it could lose its terms in silence later
