"""torch.compile(fullgraph=True) of a layer's forms: one graph, with the bits of eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import octavo_registry
from octavo import MXFP8, NVFP4, PRESETS, DelayedScaling, Recipe
from octavo_torch import (
    GroupedLinear,
    GroupedMLP,
    Sequential,
    add_lora,
    choose_experts,
    dequantize,
    grouped_linear,
    grouped_linear_quantized,
    grouped_mlp,
    grouped_mm,
    moe_mlp,
    permute,
    quantize,
    quantize_input,
    quantize_weight,
)

SIZES = torch.tensor([20, 0, 40])
M, K, F, N, G = 70, 32, 24, 16, len(SIZES)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """On the reference: other backends have tests of their own."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with octavo_registry.prefer("torch-reference"):
        yield
    torch.compiler.reset()


def check(function: Callable[..., Any], leaves: list[Tensor], *rest: Any) -> None:
    """Results and gradients of the leaves, compiled as they are; one graph."""
    made = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        results = call(*rest)
        results = results if isinstance(results, tuple) else (results,)
        made.append([*results, *torch.autograd.grad([value.sum() for value in results], leaves)])
    assert len(made[0]) == len(made[1])
    for eager, compiled in zip(*made, strict=True):
        assert torch.equal(eager, compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_modules(rng: np.random.Generator) -> None:
    """A parameter a group, interleaved gate and up, scaled bias, slots of each GEMM, delayed scaling, in one graph."""
    model = Sequential(
        GroupedLinear(G, K, K, bias=True, recipe=DelayedScaling(history=2), per_group_parameters=True),
        GroupedMLP(
            G, K, F, N, bias=True, recipe=MXFP8(wgrad="high_precision"), interleave=4, per_group_parameters=True
        ),
    ).eval()
    last = GroupedLinear(G, N, N, bias=True, recipe=MXFP8(dgrad="high_precision"))
    x, scales, probs = torch.randn(M, K).requires_grad_(), torch.rand(M).requires_grad_(), torch.rand(M)

    def run(x: Tensor, sizes: Tensor, probs: Tensor, scales: Tensor) -> Tensor:
        result: Tensor = last(model(x, sizes, probs), sizes, bias_scales=scales)
        return result

    check(run, [x, scales, *model.parameters(), *last.parameters()], x, SIZES, probs, scales)


def test_operands_that_are_quantized(rng: np.random.Generator) -> None:
    """A GroupedTensor and a QuantizedInput as x, quantized weights of one tensor and of one a group."""
    recipe = NVFP4()
    x, w = torch.randn(M, K).requires_grad_(), torch.randn(G, N, K).requires_grad_()
    parts = tuple(torch.randn(2 * F, K).requires_grad_() for _ in range(G))
    w2 = torch.randn(G, N, F)
    spec = recipe.quantizer("x")
    assert spec is not None
    codes, rows = quantize(x.detach(), spec, SIZES), quantize_input(x, w, SIZES, recipe)
    handles = quantize_weight(w, recipe), quantize_weight(parts, recipe, interleave=2)

    def run(codes: Any, rows: Any) -> tuple[Tensor, ...]:
        return (
            grouped_linear(codes, handles[0], None, recipe=recipe, seed=1),
            grouped_linear(rows, w, None, recipe=recipe, seed=1),
            grouped_mlp(rows, handles[1], w2, None, recipe=recipe, seed=1, interleave=2),
        )

    check(run, [x, w, *parts], codes, rows)


def test_operands_that_are_quantized_in_the_graph(rng: np.random.Generator) -> None:
    """Each function that quantizes, in one graph with what reads its codes; codes of both kinds are results, too."""
    recipe = NVFP4()
    spec, of_weights = recipe.quantizer("x"), recipe.quantizer("w")
    assert spec is not None
    assert of_weights is not None
    x, w = torch.randn(M, K).requires_grad_(), torch.randn(G, N, K).requires_grad_()
    parts = tuple(torch.randn(N, K).requires_grad_() for _ in range(G))

    def run(x: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        rows = quantize_input(x, w, sizes, recipe, seed=1)
        one, several = quantize_weight(w, recipe), quantize_weight(parts, recipe)
        return tuple(grouped_linear(rows, handle, None, recipe=recipe, seed=1) for handle in (one, several))

    check(run, [x, w, *parts], x, SIZES)

    def codes(x: Tensor, w: Tensor, sizes: Tensor) -> Any:
        rows = grouped_linear_quantized(x, w, sizes, spec, recipe=recipe, seed=1)
        return rows, dequantize(rows), quantize(w, of_weights, None), quantize(x, spec, sizes)

    eager, compiled = (call(x, w, SIZES) for call in (codes, torch.compile(codes, fullgraph=True, backend="aot_eager")))
    for ours, theirs in zip(pytree.tree_leaves(compiled), pytree.tree_leaves(eager), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert [value.spec for value in compiled[::2]] == [value.spec for value in eager[::2]]


@pytest.mark.parametrize("recipe", [DelayedScaling(history=2), PRESETS["bf16"]], ids=lambda one: one.kind)
def test_weights_are_quantized_in_the_graph(recipe: Recipe, rng: np.random.Generator) -> None:
    """A module's own, once for two microbatches of one graph, or written again unless the flag says unchanged; a
    handle that leaves the graph is good for eager calls."""
    layer = GroupedLinear(G, K, N, recipe=recipe)
    x, flag = torch.randn(M, K).requires_grad_(), torch.zeros(1, dtype=torch.int32)

    def run(x: Tensor, sizes: Tensor) -> Tensor:
        weight = layer.quantize_weight()
        result: Tensor = layer(x, sizes, weight=weight) + layer(2 * x, sizes, weight=weight)
        return result

    layer.eval()
    check(run, [x, layer.weight], x, SIZES)
    made = torch.compile(layer.quantize_weight, fullgraph=True, backend="aot_eager")()
    assert torch.equal(layer(x, SIZES, weight=made), layer(x, SIZES))
    again = torch.compile(lambda flag: layer.quantize_weight(out=kept, unchanged=flag), backend="aot_eager")
    kept = layer.quantize_weight()
    with torch.no_grad():
        layer.weight.mul_(2)
    old = copy.deepcopy(kept.codes)
    for unchanged in (1, 0):
        assert again(flag.fill_(unchanged)) is kept
        if kept.codes is not None:
            assert old is not None
            assert torch.equal(dequantize(kept.codes), dequantize(old)) == bool(unchanged)


def test_buffers(rng: np.random.Generator) -> None:
    """out= and grad_input= are written by the compiled call, too."""
    layer = GroupedMLP(G, K, F, N, recipe=MXFP8())
    x = torch.randn(M, K)
    made = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        out, grad_input = torch.full((M, N + 3), torch.nan)[:, :N], torch.full((M, K), torch.nan)
        y = call(leaf, SIZES, out=out, grad_input=grad_input)
        made.append([y.detach().clone(), *torch.autograd.grad(y.sum(), leaf)])
        assert torch.equal(out, y)
        assert torch.equal(grad_input, made[-1][-1])
    for eager, compiled in zip(*made, strict=True):
        assert torch.equal(eager, compiled)


def _linear(x: Tensor, sizes: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return grouped_linear(x, w1, sizes, recipe="fp8-block")


def _mlp(x: Tensor, sizes: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return grouped_mlp(x, w1, w2, sizes, recipe="fp8-block")


def _moe(x: Tensor, sizes: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    routed = choose_experts(x[:, :G], k=2)
    return moe_mlp(x, routed.choices, routed.weights, w1, w2, recipe="fp8-block")


@pytest.mark.parametrize("function", [_linear, _mlp, _moe])
def test_sizes_that_are_symbols(function: Callable[..., Tensor], rng: np.random.Generator) -> None:
    """Every size is a symbol with dynamic=True, which no dictionary takes as a key. A graph for each number of tokens,
    as the guide says, with the bits of eager; of the linear layer here, the others would each be traced twice."""
    w1, w2 = torch.randn(G, 2 * F, K).requires_grad_(), torch.randn(G, N, F).requires_grad_()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (M, M + 130)[: 2 if function is _linear else 1]:
        x = torch.randn(rows, K).requires_grad_()
        made = []
        for call in (function, compiled):
            y = call(x, SIZES, w1, w2)
            made.append([y, *torch.autograd.grad(y.square().sum(), [x, w1, w2], allow_unused=True)])
        for eager, ours in zip(*made, strict=True):
            assert (eager is None and ours is None) or torch.equal(eager, ours)


def test_grouped_mm_in_another_dtype() -> None:
    """`out_dtype` decides where it is given, whatever the recipe's output_dtype and autocast say."""
    x, w = torch.randn(M, K, requires_grad=True), torch.randn(G, K, N, requires_grad=True)
    ends = SIZES.cumsum(0).int()
    recipe, narrow = MXFP8(), MXFP8(output_dtype="bfloat16")
    check(lambda: grouped_mm(x, w, ends, recipe=recipe, out_dtype=torch.bfloat16), [x, w])
    assert grouped_mm(x, w, ends, recipe=narrow).dtype is torch.bfloat16
    wide = grouped_mm(x, w, ends, recipe=narrow, out_dtype=torch.float32)
    assert torch.equal(wide, grouped_mm(x, w, ends, recipe=recipe))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert grouped_mm(x, w, ends, recipe=recipe, out_dtype=torch.float32).dtype is torch.float32


def test_adapters_and_another_output_dtype() -> None:
    """fc1's result has x's dtype, which the recipe's output_dtype is not."""
    layer = GroupedMLP(G, K, F, N, recipe=MXFP8(output_dtype="bfloat16"))
    add_lora(layer, rank=4)
    check(layer, [layer.lora1.lora_A, layer.lora2.lora_B], torch.randn(M, K), SIZES)  # type: ignore[union-attr]


def test_another_seed_and_offset_in_each_step(rng: np.random.Generator) -> None:
    """Integers: one graph for the first and one for all others, with the bits of eager; a seed beyond 64 bits, too."""
    recipe, spec = NVFP4(), NVFP4().quantizer("dy")
    assert spec is not None
    x, w = torch.randn(M, K, requires_grad=True), torch.randn(G, N, K, requires_grad=True)

    def step(x: Tensor, seed: int, first: int) -> tuple[Tensor, Tensor]:
        where: dict[str, int] = {"seed": seed, "group_offset": first}
        codes = quantize(x, spec, SIZES, **where)
        y = grouped_linear(quantize_input(x, w, SIZES, recipe, **where), w, None, recipe=recipe, **where)
        return y, dequantize(codes)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed, first in ((1, 0), (2, 3), (int(rng.integers(1 << 62)), 6), ((1 << 64) - 5, int(rng.integers(1 << 31)))):
        found = []
        for call in (step, compiled):
            y, values = call(x, seed, first)
            found.append((y, values, *torch.autograd.grad(y.square().sum(), [x, w])))
        assert all(torch.equal(eager, traced) for eager, traced in zip(*found, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


def test_other_numbers_in_one_compiled_function(rng: np.random.Generator) -> None:
    """As where layers of a model differ: what a layer is made of is compiled in. The second number once failed."""
    x, logits = torch.randn(M, K), torch.randn(M, 12)
    w1, w2 = torch.randn(G, 2 * F, K), torch.randn(G, N, F)

    def step(k: int, experts: int, block: int) -> tuple[Tensor, ...]:
        choice = choose_experts(logits[:, :experts], k)
        rows, sizes, _ = permute(x, choice.choices, experts)
        y = grouped_mlp(x, w1, w2, SIZES, recipe="bf16", interleave=block)
        return choice.choices, choice.weights, rows, sizes, y

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for numbers in ((2, 8, 12), (3, 12, 4), (4, 9, 6)):
        found = step(*numbers), compiled(*numbers)
        assert all(torch.equal(eager, traced) for eager, traced in zip(*found, strict=True))


def test_codes_that_are_made_in_each_step(rng: np.random.Generator) -> None:
    """Of a weight that an optimizer changes, and of other rows: one graph serves all steps, with the bits of eager."""
    layer, twin = (GroupedLinear(G, K, N, recipe=MXFP8()) for _ in range(2))
    twin.load_state_dict(layer.state_dict())

    def run(layer: GroupedLinear, rows: Any, weight: Any) -> Tensor:
        y: Tensor = layer(rows, None, weight=weight)
        return y

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    memory = torch.empty(M, K)
    for _ in range(3):
        memory.copy_(torch.randn(M, K))
        for call, module in ((run, twin), (compiled, layer)):
            rows = module.quantize_input(memory, SIZES)
            call(module, rows, module.quantize_weight()).square().sum().backward()
            with torch.no_grad():
                module.weight.sub_(module.weight.grad, alpha=0.01)  # type: ignore[arg-type]
            module.weight.grad = None
        assert torch.equal(layer.weight, twin.weight)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
