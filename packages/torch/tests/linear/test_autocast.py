"""Layers of fp32 parameters inside of torch.autocast: main_grad, postponed gradients and codes that were made once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from covering import pairwise
from torch import Tensor, nn

from octavo import BlockScaling
from octavo_torch import (
    Choice,
    GroupedLinear,
    GroupedMLP,
    MasterWeights,
    MoE,
    QuantizedWeight,
    add_lora,
    dequantize,
    grouped_linear,
    quantize_input,
    quantize_weight,
    quantized_parameters,
)
from octavo_torch.arrays.zero_gradient import ZeroGradient

REFERENCE = "torch-reference"
G, K, F, M = 3, 64, 48, 40
SIZES = [15, 0, 20]
KINDS = "linear", "mlp", "moe"
CHOICE = Choice(torch.arange(2 * M).view(M, 2) % (G + 1) - 1, torch.linspace(0, 1, 2 * M).view(M, 2), torch.empty(0))
HALVES = [torch.bfloat16, torch.float16]


def autocast(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype)


def make(kind: str, recipe: str | None = "mxfp8", **more: Any) -> Any:
    """A layer of fp32 parameters; None: with the recipe of quantized_parameters."""
    how: dict[str, Any] = {"bias": True, "backend": REFERENCE, "seed": 7, **more}
    if recipe is not None:
        how["recipe"] = recipe
    if kind == "linear":
        return GroupedLinear(G, K, F, **how)
    return GroupedMLP(G, K, F, **how) if kind == "mlp" else MoE(G, K, F, 2, **how)


def run(layer: Any, x: Tensor, codes: Any = None) -> Tensor:
    """Whatever x is rounded to, it goes to the same experts."""
    sizes: Any = (CHOICE,) if isinstance(layer, MoE) else (SIZES,)
    given = {} if codes is None else {"weight" if isinstance(layer, GroupedLinear) else "weights": codes}
    y: Tensor = layer(x, *sizes, **given)
    return y


def codes_of(layer: Any, **more: Any) -> Any:
    return layer.quantize_weight(**more) if isinstance(layer, GroupedLinear) else layer.quantize_weights(**more)


def weights_of(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in layer.named_parameters() if name.startswith("weight")}


def cast_by_hand(layer: Any, dtype: torch.dtype) -> Any:
    """A copy whose weights are in `dtype`, as autocast has them in a call."""
    twin = copy.deepcopy(layer)
    for value in weights_of(twin).values():
        value.data = value.data.to(dtype)
    return twin


def twice(layer: Any, batches: list[tuple[Tensor, Tensor]], codes: Any = None) -> list[Tensor]:
    """Two microbatches, forward and backward: y and dx of each."""
    found = []
    for x, dy in batches:
        leaf = x.clone().requires_grad_()
        y = run(layer, leaf, codes)
        y.backward(dy.to(y.dtype))
        assert leaf.grad is not None
        found += [y.detach(), leaf.grad.float()]
    return found


def batches_of(layer: Any) -> list[tuple[Tensor, Tensor]]:
    columns = F if isinstance(layer, GroupedLinear) else K
    return [(torch.randn(M, K), torch.randn(M, columns)) for _ in range(2)]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


MAIN_GRADS = {
    "kind": KINDS,
    "mode": ("accumulate", "overwrite"),
    "more": ({}, {"delay_wgrad": True}, {"per_group_parameters": True}),
    "dtype": HALVES,
}


@pytest.mark.parametrize(("kind", "mode", "more", "dtype"), pairwise(MAIN_GRADS), ids=str)
def test_main_grad_of_a_parameter_that_autocast_casts(
    kind: str, mode: str, more: Any, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    """The fp32 parameter is the leaf: its buffer gets the unrounded gradient, with the bits of a weight cast by hand,
    its .grad zeros without memory, and its hooks run once a backward."""
    layer = make(kind, main_grad=mode, **more)
    by_hand = cast_by_hand(layer, dtype)
    calls: list[str] = []
    for module in (layer, by_hand):
        for name, value in weights_of(module).items():
            value.main_grad = torch.randn(value.shape, generator=torch.Generator().manual_seed(3))  # type: ignore[attr-defined]
            if module is layer:
                value.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))  # type: ignore[misc]
    batches = batches_of(layer)
    with autocast(dtype):
        ours = twice(layer, batches)
    theirs = twice(by_hand, [(x.to(dtype), dy) for x, dy in batches])
    for module in (layer, by_hand):
        if module.delayed_wgrad is not None:
            module.backward_dw()
    # dx is rounded to x's dtype, which is fp32 here
    assert_same(ours[::2], theirs[::2])
    for name, value in weights_of(layer).items():
        assert value.grad_added_to_main_grad  # type: ignore[attr-defined]
        assert_same([value.main_grad], [by_hand.get_parameter(name).main_grad])  # type: ignore[attr-defined]
        assert value.grad is not None
        assert value.grad.dtype is torch.float32
        assert isinstance(value.grad, ZeroGradient)
        assert not value.grad.is_written
        assert calls.count(name) == 2


@pytest.mark.parametrize("recipe", ["bf16", "fp8-block", "nvfp4"])
@pytest.mark.parametrize("kind", KINDS)
def test_postponed_gradients_of_parameters_that_autocast_casts(
    kind: str, recipe: str, rng: np.random.Generator
) -> None:
    """backward_dw, outside of autocast, adds to .grad in fp32 what backward would."""
    later, now = make(kind, recipe, delay_wgrad=True), make(kind, recipe)
    now.load_state_dict(later.state_dict())
    batches = batches_of(now)
    with autocast():
        results = [twice(layer, batches) for layer in (later, now)]
    assert all(value.grad is None for value in weights_of(later).values())
    later.backward_dw()
    assert_same(*results)
    assert_same(*([value.grad for value in weights_of(layer).values()] for layer in (later, now)))


@pytest.mark.parametrize("more", [{}, {"per_group_parameters": True}, {"codes": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_in_fp32_of_a_parameter_that_autocast_casts(
    kind: str, more: dict[str, bool], rng: np.random.Generator
) -> None:
    """The recipe's wgrad_dtype: it reaches the parameter with the bits that main_grad gets; autograd's way back through
    a cast would round it to 16."""
    own, how = more.get("codes", False), {name: value for name, value in more.items() if name != "codes"}
    recipe: Any = BlockScaling(wgrad_dtype="float32")
    layer, other = make(kind, recipe, **how), make(kind, recipe, main_grad="overwrite", **how)
    other.load_state_dict(layer.state_dict())
    for value in weights_of(other).values():
        value.main_grad = torch.empty_like(value)  # type: ignore[attr-defined]
    batches = batches_of(layer)[:1]
    results = []
    for module in (layer, other):
        with autocast():
            results.append(twice(module, batches, codes_of(module) if own else None))
    assert_same(*results)
    for name, value in weights_of(layer).items():
        assert_same([value.grad], [other.get_parameter(name).main_grad])  # type: ignore[attr-defined]
        assert not value.grad.any() or not torch.equal(value.grad, value.grad.bfloat16().float())  # type: ignore[union-attr]


def test_a_gradient_in_fp32_in_one_graph(rng: np.random.Generator) -> None:
    """torch.compile(fullgraph=True) inside of autocast: the bits of eager."""
    layer, x = make("linear", BlockScaling(wgrad_dtype="float32")), torch.randn(M, K)  # type: ignore[arg-type]
    grads = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        with autocast():
            y = call(x, torch.tensor(SIZES))
        grads += torch.autograd.grad(y.float().square().sum(), layer.weight)
    assert torch.equal(*grads)
    assert not torch.equal(grads[1], grads[1].bfloat16().float())


CODES_MADE_ONCE = {
    "kind": KINDS,
    "recipe": ("bf16", "mxfp8", "fp8-current", "nvfp4", "fp8-delayed"),
    "options": ({}, {"main_grad": "accumulate"}, {"delay_wgrad": True}),
}


@pytest.mark.parametrize(("kind", "recipe", "options"), pairwise(CODES_MADE_ONCE), ids=str)
def test_codes_made_once_inside_of_autocast(kind: str, recipe: str, options: Any, rng: np.random.Generator) -> None:
    """They are those that a call inside makes: the same bits, for all microbatches of a step; also as a copy, from a
    pickle, and written again."""
    layer = make(kind, recipe, **options)
    plain = copy.deepcopy(layer)
    for module in (layer, plain):
        for value in weights_of(module).values():
            value.main_grad = torch.zeros_like(value)  # type: ignore[attr-defined]
    batches = batches_of(layer)
    with autocast():
        codes = codes_of(layer)
        ours, theirs = twice(layer, batches, codes), twice(plain, batches)
        again = codes_of(layer, out=codes)
        y = run(layer, batches[0][0], again)
    assert_same(ours, theirs)
    for module in (layer, plain):
        if module.delayed_wgrad is not None:
            module.backward_dw()
    for name, value in weights_of(layer).items():
        other = plain.get_parameter(name)
        assert_same([value.grad, value.main_grad], [other.grad, other.main_grad])  # type: ignore[attr-defined]
    assert torch.equal(y, ours[0])
    for kept in (copy.deepcopy(codes), pickle.loads(pickle.dumps(codes))):
        one, own = (pair if isinstance(pair, QuantizedWeight) else pair[0] for pair in (kept, codes))
        assert one.values_dtype is own.values_dtype


@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_values_in_another_dtype(kind: str) -> None:
    """Codes of fp32 values are not those of bf16 ones: each is refused where the other is read, and says what to do."""
    layer, x = make(kind), torch.randn(M, K)
    name = "weight" if kind == "linear" else "w1"
    outside = codes_of(layer)
    with autocast():
        inside = codes_of(layer)
        with pytest.raises(
            ValueError, match=f"^{name} was quantized outside of torch.autocast, from values in float32"
        ):
            run(layer, x, outside)
        with pytest.raises(ValueError, match=r"out was quantized outside of torch.autocast"):
            codes_of(layer, out=outside)
        run(layer, x, inside)
    with pytest.raises(ValueError, match=f"^{name} was quantized inside of torch.autocast, .* reads them in float32"):
        run(layer, x, inside)
    with autocast(torch.float16), pytest.raises(ValueError, match=r"from values in bfloat16, .* reads them in float16"):
        run(layer, x, inside)
    run(layer, x, outside)
    # of weights that autocast leaves as they are the codes are the same on either side
    half, half_x = layer.bfloat16(), x.bfloat16()
    outside = codes_of(half)
    with autocast():
        inside = codes_of(half)
        y = run(half, half_x, outside)
    assert torch.equal(run(half, half_x, inside), y)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8-current", "fp8-delayed"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_an_input_quantized_once_inside_of_autocast(kind: str, recipe: str, rng: np.random.Generator) -> None:
    """Its codes are those that a call inside makes, the weight's may be made once, too, and gradients arrive in the
    dtype of the leaf; codes of other values are refused. Such calls once ran outside of autocast, without a word."""
    layer = make(kind, recipe)
    like = layer if kind == "linear" else GroupedLinear(G, K, 2 * F, recipe=layer.recipe, backend=REFERENCE)
    twin = copy.deepcopy(layer)
    (x, dy), *_ = batches_of(layer)
    found = []
    for module in (layer, twin):
        leaf = x.clone().requires_grad_()
        with autocast():
            rows: Any = leaf
            if module is layer and kind == "linear":
                rows = layer.quantize_input(leaf, SIZES)
            elif module is layer:
                state = None if layer.states is None else layer.states[0]
                rows = quantize_input(leaf, like.weight, SIZES, layer.recipe, state=state, backend=REFERENCE)
            y = module(rows, SIZES if rows is leaf else None)
        y.backward(dy.to(y.dtype))
        found.append([y.detach(), leaf.grad, *(value.grad for value in weights_of(module).values())])
    assert found[0][0].dtype is torch.bfloat16
    assert_same(*found)
    if kind == "linear":
        with autocast():
            assert torch.equal(layer(layer.quantize_input(x, SIZES), None, weight=codes_of(layer)), layer(x, SIZES))
        outside = layer.quantize_input(x, SIZES)
        with autocast(), pytest.raises(ValueError, match=r"x was quantized outside of torch.autocast, .* in bfloat16"):
            layer(outside, None)


def test_codes_made_once_in_one_graph(rng: np.random.Generator) -> None:
    """torch.compile(fullgraph=True) of quantize_weight and a call of it, inside of autocast: the bits of eager."""
    w, x = torch.randn(G, F, K, requires_grad=True), torch.randn(M, K, requires_grad=True)
    sizes = torch.tensor(SIZES)

    def step(x: Tensor, w: Tensor) -> Tensor:
        with autocast():
            weight = quantize_weight(w, "mxfp8", backend=REFERENCE)
            return grouped_linear(x, weight, sizes, recipe="mxfp8", backend=REFERENCE)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        y = function(x, w)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, w])])
    assert results[0][0].dtype is torch.bfloat16
    assert_same(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_codes(kind: str, rng: np.random.Generator) -> None:
    """A layer that was created inside of autocast holds codes of its own values, calls in autocast copy no plane, and
    main_grad reaches the masters."""
    torch.manual_seed(seed := int(rng.integers(1 << 31)))
    with quantized_parameters("fp8-block"), autocast():
        layer = make(kind, None, main_grad="accumulate")
    torch.manual_seed(seed)
    with quantized_parameters("fp8-block"):
        plain = make(kind, None)
    masters = MasterWeights(layer)
    batches = batches_of(layer)
    planes = {
        value.data_ptr() for weight in weights_of(layer).values() for value in weight.codes.__dict__.values()  # type: ignore[attr-defined]
        if isinstance(value, Tensor)
    }  # fmt: skip
    saved: set[int] = set()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda value: (saved.add(value.data_ptr()), value)[1], lambda v: v)
    with autocast(), hooks:
        ours = twice(layer, batches)
    with autocast():
        theirs = twice(plain, batches)
    assert_same(ours, theirs)
    assert len(saved & planes) >= (2 if kind == "linear" else 4)
    for name, weight in weights_of(plain).items():
        own = layer.get_parameter(name)
        assert torch.equal(dequantize(own.codes), dequantize(weight.codes))  # type: ignore[attr-defined]
        master = masters[name]
        assert master.grad is not None
        assert weight.grad is not None
        # one was added up in fp32; of the other each microbatch was rounded to bf16
        bound = 2.0**-8 * (master.grad.abs() + weight.grad.abs()) + 2.0**-8 * weight.grad.abs().amax()
        assert bool(((master.grad - weight.grad).abs() <= bound).all())
        assert bool(master.grad.any())


def test_adapters_beside_weights_that_train(rng: np.random.Generator) -> None:
    """A layer with adapters, whose codes were made once inside of autocast, and whose gradients go to main_grad."""
    layer, found = make("mlp", main_grad="accumulate"), []
    add_lora(layer, 4)
    nn.init.normal_(layer.lora1.lora_B)
    batches = batches_of(layer)
    for made_once in (True, False):
        for value in weights_of(layer).values():
            value.requires_grad_().main_grad = torch.zeros_like(value)  # type: ignore[attr-defined]
        with autocast():
            y = twice(layer, batches, layer.quantize_weights() if made_once else None)
        found.append([*y, *(value.main_grad for value in weights_of(layer).values())])  # type: ignore[attr-defined]
    assert all(bool(value.any()) for value in found[0])
    assert_same(*found)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_tangent_inside_of_autocast() -> None:
    """Forward-mode differentiation is refused by the layer's sentence, of rows and of weights."""
    x, w = torch.randn(M, K), torch.randn(G, F, K)
    for of_rows in (True, False):
        with autocast(), torch.autograd.forward_ad.dual_level():
            primal = x if of_rows else w
            dual = torch.autograd.forward_ad.make_dual(primal, torch.ones_like(primal))
            given = (dual, w) if of_rows else (x, dual)
            with pytest.raises(NotImplementedError, match="carries a tangent of forward-mode"):
                grouped_linear(*given, SIZES, recipe="mxfp8", backend=REFERENCE)
