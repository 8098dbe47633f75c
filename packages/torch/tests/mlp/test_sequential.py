"""Sequential and Activation: fused runs have the bits of their operations in a row, and it says what it fused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from covering import pairwise
from float64_sums import assert_sums
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from octavo import MXFP8, NVFP4, BlockScaling, DelayedScaling, HighPrecision, Recipe
from octavo_torch import Activation, GroupedLinear, GroupedMLP, Sequential, activate, update_scales
from octavo_torch.arrays.per_group import leaves_of
from octavo_torch.functions.activations import ACTIVATIONS

SIZES = torch.tensor([20, 0, 40])
M, K, F, N, G = 70, 64, 48, 80, len(SIZES)
RECIPES: tuple[Recipe, ...] = (HighPrecision(), DelayedScaling(history=3), MXFP8(), NVFP4())


def layer(inputs: int, outputs: int, recipe: Recipe, seed: int = 0, **rest: Any) -> GroupedLinear:
    return GroupedLinear(
        G, inputs, outputs, bias=True, recipe=recipe, dtype=torch.bfloat16, seed=seed, backend="torch-reference", **rest
    )


def experts(recipe: Recipe) -> Sequential:
    return Sequential(layer(K, 2 * F, recipe, 1), Activation("geglu"), layer(F, N, recipe, 2))


def in_a_row(model: Sequential, x: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
    first, activation, second = model.operations
    result: Tensor = second(activation(first(x, sizes), probs), sizes)
    return result


def train(model: Sequential, forward: Any, data: list[tuple[Tensor, ...]]) -> list[Tensor]:
    seen: list[Tensor] = []
    for x, probs, dy in data:
        model.zero_grad()
        leaves = x.clone().requires_grad_(), probs.clone().requires_grad_()
        y = forward(model, leaves[0], SIZES, leaves[1])
        y.backward(dy)
        update_scales(model)
        seen += [y.detach(), *(value.grad for value in (*leaves, *model.parameters()) if value.grad is not None)]
        seen += [buffer.clone() for buffer in model.buffers()]
    return seen


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
def test_a_fused_run_has_the_bits_of_its_operations(recipe: Recipe, rng: np.random.Generator) -> None:
    """y, gradients, scales and seed counters of two steps; each layer draws from its own seed."""
    model = experts(recipe)
    assert [(step.first, step.last) for step in model.steps()] == [(0, 2)]
    data = [(torch.randn(M, K).bfloat16(), torch.rand(M), torch.randn(M, N).bfloat16()) for _ in range(2)]
    theirs = train(copy.deepcopy(model), in_a_row, data)
    ours = train(model, lambda model, *arguments: model(*arguments), data)
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left, right)


def test_one_graph(rng: np.random.Generator) -> None:
    """fullgraph with the bits of eager, an operation of torch's own in between."""
    model = Sequential(nn.Linear(K, K, dtype=torch.bfloat16), *experts(MXFP8()).operations)
    x, probs = torch.randn(M, K).bfloat16(), torch.rand(M)
    torch.compiler.reset()
    assert torch.equal(
        torch.compile(model, fullgraph=True, backend="aot_eager")(x, SIZES, probs), model(x, SIZES, probs)
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_has_its_gradients(name: str, rng: np.random.Generator) -> None:
    """The module is the function; gradients are there for what asks for them."""
    x, probs = torch.randn(5, 8, requires_grad=True), torch.rand(5, requires_grad=True)
    y = Activation(name)(x, probs)
    assert torch.equal(y, activate(x.detach(), name, probs=probs.detach()))
    dx, dprobs = torch.autograd.grad(y.sum(), (x, probs))
    assert_sums(dprobs, activate(x.detach(), name))
    assert torch.equal(torch.autograd.grad(activate(x, name, probs=probs.detach()).sum(), x)[0], dx)


def test_it_says_what_it_fused(rng: np.random.Generator) -> None:
    """A line a step, with the reason wherever three operations nearly run as one."""
    x = torch.randn(M, K).bfloat16()
    told = experts(MXFP8()).explain(x, SIZES)
    assert "0 GroupedLinear + 1 geglu + 2 GroupedLinear: one grouped_mlp" in told
    assert "gradient and quantize: composed: no backend serves dact_quantize" in told
    gelu = Activation("gelu")
    row = layer(K, F, MXFP8())
    reasons = [
        ((row, gelu, layer(F, N, BlockScaling())), "the recipes are mxfp8"),
        ((row, gelu), "no GroupedLinear follows gelu"),
        (
            (row, Activation("swiglu"), layer(F, N, MXFP8())),
            "swiglu reads 96 features and the layer before it makes 48",
        ),
        ((row, gelu, layer(F, N, MXFP8(), main_grad="overwrite")), "main_grad is None and 'overwrite'"),
        ((row, gelu, layer(F, N, MXFP8()).eval()), "training is True and False"),
    ]
    for operations, reason in reasons:
        assert f"0 GroupedLinear: not fused, {reason}" in Sequential(*operations).explain(x, SIZES)
    watched = experts(MXFP8())
    watched.operations[0].register_forward_hook(lambda *_: None)
    assert "a module has hooks" in watched.explain(x, SIZES)


def test_hooks_of_all_modules_are_called(rng: np.random.Generator) -> None:
    """torch registers hooks for every module there is, as its FlopCounterMode does: no layer is left out."""
    x, model, called = torch.randn(M, K).bfloat16(), experts(MXFP8()), list[str]()
    expected = model(x, SIZES)
    hook = register_module_forward_pre_hook(lambda module, _: called.append(type(module).__name__))
    try:
        assert "a module has hooks" in model.explain(x, SIZES)
        called.clear()
        assert torch.equal(model(x, SIZES), expected)
    finally:
        hook.remove()
    assert called == ["Sequential", "GroupedLinear", "Activation", "GroupedLinear"]


class Twice(Activation):
    """An activation of the caller's."""

    def forward(self, x: Tensor, probs: Tensor | None = None) -> Tensor:
        return 2 * super().forward(x, probs)


def test_a_forward_of_the_callers_own_runs(rng: np.random.Generator) -> None:
    """A subclass of Activation, and a module's forward that has been replaced, as accelerate does, are not fused."""
    x, probs = torch.randn(M, K).bfloat16(), torch.rand(M)
    model = experts(HighPrecision())
    first, _, second = model.operations
    own = Sequential(first, Twice("geglu"), second)
    assert torch.equal(own(x, SIZES, probs), in_a_row(own, x, SIZES, probs))
    assert not torch.equal(own(x, SIZES, probs), model(x, SIZES, probs))
    before, ran = second.forward, []
    second.forward = lambda *args, **rest: (ran.append(1), before(*args, **rest))[1]  # type: ignore[method-assign]
    model(x, SIZES, probs)
    assert ran
    assert "a forward of its own" in model.explain(x, SIZES)


def test_messages(rng: np.random.Generator) -> None:
    """Errors name the argument, what was given, and what is needed."""
    with pytest.raises(ValueError, match="operation 1 is a str; give modules"):
        Sequential(Activation(), "swiglu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there are 2 activations; give it with one"):
        Sequential(Activation("silu"), GroupedMLP(G, 4, 4))(torch.randn(60, 4), SIZES, torch.rand(60))
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        Activation("tanh")
    with pytest.raises(ValueError, match="x has 7 columns and swiglu reads"):
        activate(torch.randn(3, 7), "swiglu")
    with pytest.raises(ValueError, match=r"probs has shape \[2\]; give \[3\]"):
        activate(torch.randn(3, 8), "swiglu", probs=torch.rand(2))


def plain(operation: nn.Module, x: Tensor, scales: Tensor | None = None, probs: Tensor | None = None) -> Tensor:
    """One operation of a Sequential by itself."""
    result: Tensor
    if isinstance(operation, GroupedMLP):
        result = operation(x, SIZES, probs, bias2_scales=scales)
    elif isinstance(operation, GroupedLinear):
        result = operation(x, SIZES, bias_scales=scales)
    else:
        result = operation(x, probs) if isinstance(operation, Activation) else operation(x)
    return result


def gate(seed: int = 1, **rest: Any) -> GroupedLinear:
    return layer(K, 2 * F, MXFP8(), seed, **rest)


SCALED: dict[str, tuple[Callable[[], list[nn.Module]], Callable[[Tensor, Tensor], dict[str, Any]], set[int]]] = {
    "fused, second": (lambda: list(experts(MXFP8()).operations), lambda a, _: {"bias2_scales": a}, {2}),
    "fused, by number": (lambda: list(experts(MXFP8()).operations), lambda a, _: {"bias_scales": {2: a}}, {2}),
    "not fused, first": (lambda: list(experts(MXFP8()).operations), lambda a, _: {"bias_scales": {0: a}}, {0}),
    "not fused, both": (
        lambda: list(experts(MXFP8()).operations),
        lambda a, b: {"bias_scales": {0: a}, "bias2_scales": b},
        {0, 2},
    ),
    "one layer": (lambda: [gate(), nn.SiLU()], lambda a, _: {"bias_scales": a}, {0}),
    "the one with a bias": (
        lambda: [GroupedLinear(G, K, K, recipe=MXFP8(), dtype=torch.bfloat16, backend="torch-reference"), gate()],
        lambda a, _: {"bias_scales": a},
        {1},
    ),
    "an MLP": (
        lambda: [GroupedMLP(G, K, F, N, bias=True, recipe=MXFP8(), dtype=torch.bfloat16, backend="torch-reference")],
        lambda a, _: {"bias2_scales": a},
        {0},
    ),
    "an MLP and a layer": (
        lambda: [
            gate(),
            GroupedMLP(G, 2 * F, F, N, bias=True, recipe=MXFP8(), dtype=torch.bfloat16, backend="torch-reference"),
        ],
        lambda a, b: {"bias_scales": a, "bias2_scales": b},
        {0, 1},
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_bias_scales_reach_their_layer(name: str, rng: np.random.Generator) -> None:
    """The bits of the operations in a row, the scales' gradients included, with NaN scales past the sum."""
    make, given, scaled = SCALED[name]
    model = Sequential(*make())
    x = torch.randn(M, K).bfloat16()
    made = []
    draws = [torch.randn(M), torch.randn(M)]
    for draw in draws:
        draw[60:] = torch.nan
    for through in (True, False):
        model.zero_grad()
        a, b = (draw.clone().requires_grad_() for draw in draws)
        arguments = given(a, b)
        if through:
            y = model(x, SIZES, **arguments)
        else:
            unused = iter([a, b])
            y = x
            for at, operation in enumerate(model.operations):
                y = plain(operation, y, next(unused) if at in scaled else None)
        y.backward(torch.ones_like(y))
        grads = [value.grad for value in (a, b, *model.parameters())]
        assert a.grad is not None
        assert a.grad.any()
        made.append([y.detach(), *(grad for grad in grads if grad is not None)])
    for ours, theirs in zip(*made, strict=True):
        assert torch.equal(ours, theirs)


def test_scales_without_one_bias_are_refused(rng: np.random.Generator) -> None:
    """None, several, twice, a number that is no layer; and explain's reason where a first bias is scaled."""
    x, scales = torch.randn(M, K).bfloat16(), torch.rand(M)
    model = experts(MXFP8())
    for arguments, sentence in (
        ({"bias_scales": scales}, r"2 operations are a GroupedLinear with a bias; give bias_scales=\{number: .* 0, 2"),
        (
            {"bias_scales": {1: scales}},
            r"operation 1, which has no bias to scale; give bias_scales=\{number: scales\} with .* 0, 2",
        ),
        ({"bias_scales": {2: scales}, "bias2_scales": scales}, "both for operation 2; give one of them"),
        ({"bias_scales": {2: scales[:5]}}, r"bias2_scales has shape \[5\]; give \[70\]"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model(x, SIZES, **arguments)
    with pytest.raises(ValueError, match=r"bias2_scales is .* and 0 operations are a GroupedMLP"):
        Sequential(gate())(x, SIZES, bias2_scales=scales)
    unbiased = GroupedLinear(G, K, N, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"0 operations are .* leave it out: no layer has a bias"):
        Sequential(unbiased)(x, SIZES, bias_scales=scales)
    told = [step.why for step in model.steps(scaled={0})]
    assert told[0].startswith("scales multiply the bias of operation 0")


def train_with_main_grad(model: Sequential, data: list[tuple[Tensor, ...]], delayed: bool) -> list[Tensor]:
    """y and the other gradients of microbatches."""
    seen: list[Tensor] = []
    for x, probs, dy in data:
        leaves = x.clone().requires_grad_(), probs.clone().requires_grad_()
        y = model(leaves[0], SIZES, leaves[1])
        y.backward(dy)
        seen += [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    if delayed:
        model.backward_dw()
    return seen + [p.grad for name, p in model.named_parameters() if "bias" in name and p.grad is not None]


MAIN_GRADS = {
    "mode": ("accumulate", "overwrite"),
    "parted": (False, True, {"bias"}, {"weight"}),
    "delayed": (False, True),
    "fused": (True, False),
}


@pytest.mark.parametrize(("mode", "parted", "delayed", "fused"), pairwise(MAIN_GRADS), ids=str)
def test_main_grad(mode: Any, parted: Any, delayed: bool, fused: bool, rng: np.random.Generator) -> None:
    """Every weight's gradient of two microbatches in its buffer, as grouped_linear and grouped_mlp write it; everything
    else has the bits of a model without; .grad of the weights takes no memory."""
    rest: dict[str, Any] = {"main_grad": mode, "per_group_parameters": parted, "delay_wgrad": delayed}
    recipe = MXFP8()
    model = Sequential(layer(K, 2 * F, recipe, 1, **rest), Activation("swiglu"), layer(F, N, recipe, 2, **rest))
    plain_model = Sequential(layer(K, 2 * F, recipe, 1), Activation("swiglu"), layer(F, N, recipe, 2))
    plain_model.load_state_dict(model.state_dict())
    if not fused:
        for one in (model, plain_model):
            one.operations[0].register_forward_hook(lambda *_: None)
    assert [(step.first, step.last) for step in model.steps()] == ([(0, 2)] if fused else [(0, 0), (1, 1), (2, 2)])
    weights = {name: p for name, p in model.named_parameters() if "weight" in name}
    for weight in weights.values():
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    data = [(torch.randn(M, K).bfloat16(), torch.rand(M), torch.randn(M, N).bfloat16()) for _ in range(2)]
    ours, theirs = train_with_main_grad(model, data, delayed), train_with_main_grad(plain_model, data, False)
    for left, right in zip(ours[:6], theirs[:6], strict=True):
        assert torch.equal(left, right)
    assert torch.equal(torch.cat([grad.flatten() for grad in ours[6:]]), torch.cat([g.flatten() for g in theirs[6:]]))
    for weight in weights.values():
        assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
        assert delayed or weight.grad is not None
        assert weight.grad is None or weight.grad.untyped_storage().nbytes() == weight.element_size()
    # a layer of its own is held to the bounds elsewhere: here, that each buffer has its own layer's sums
    expected = Sequential(
        layer(K, 2 * F, recipe, 1, main_grad=mode), Activation("swiglu"), layer(F, N, recipe, 2, main_grad=mode)
    )
    expected.load_state_dict(model.state_dict())
    for at in (0, 2):
        expected.operations[at].weight.main_grad = torch.zeros(expected.operations[at].weight.shape)  # type: ignore[attr-defined]
    for x, probs, dy in data:
        in_a_row(expected, x, SIZES, probs).backward(dy)
    for at in (0, 2):
        leaves = leaves_of(model.operations[at].weights)  # type: ignore[arg-type]
        sums = torch.cat([leaf.main_grad.flatten() for leaf in leaves])  # type: ignore[attr-defined]
        assert sums.any()
        assert torch.equal(sums, expected.operations[at].weight.main_grad.flatten())  # type: ignore[union-attr]


def test_leading_axes(rng: np.random.Generator) -> None:
    """x [..., K] through every kind of operation: the bits of its rows, in its axes."""
    model = Sequential(nn.Linear(K, K, dtype=torch.bfloat16), *experts(MXFP8()).operations)
    x, probs, scales = torch.randn(M, K).bfloat16(), torch.rand(M), torch.rand(M)
    y = model(x, SIZES, probs, bias2_scales=scales)
    shaped = model(x.view(2, 35, K), SIZES, probs.view(2, 35), bias2_scales=scales.view(2, 35))
    assert shaped.shape == (2, 35, N)
    assert torch.equal(shaped.view(M, N), y)
    assert model.explain(x.view(2, 35, K), SIZES) == model.explain(x, SIZES)
    with pytest.raises(ValueError, match=r"probs is \[70\]; give x's leading axes, \[2, 35\]"):
        model(x.view(2, 35, K), SIZES, probs)
