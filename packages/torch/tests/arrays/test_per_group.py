"""One parameter per group: the bits of one parameter for all, one block of memory, state dicts of either form."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import octavo_registry
from octavo import MXFP8, NVFP4, DelayedScaling, HighPrecision, Recipe
from octavo_torch import (
    Activation,
    GroupedLinear,
    GroupedMLP,
    Sequential,
    grouped_linear,
    quantize_input,
    quantize_weight,
)
from octavo_torch.arrays.per_group import leaves_of, stacked_view
from octavo_torch.scaling.recipe_module import RecipeModule

SIZES = torch.tensor([20, 0, 40])
M, K, F, N, G = 70, 32, 48, 16, len(SIZES)
RECIPES: tuple[Recipe, ...] = (HighPrecision(), MXFP8(), NVFP4(), DelayedScaling(history=3))


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    """Whatever else is installed: other backends have tests of their own."""
    with octavo_registry.prefer("torch-reference"):
        yield


def linear(recipe: Recipe | None = None, **rest: Any) -> GroupedLinear:
    return GroupedLinear(G, K, N, bias=True, recipe=recipe, dtype=torch.bfloat16, seed=1, **rest)


def mlp(recipe: Recipe | None = None, **rest: Any) -> GroupedMLP:
    return GroupedMLP(G, K, F, N, bias=True, recipe=recipe, dtype=torch.bfloat16, seed=1, **rest)


MAKERS = {"linear": linear, "mlp": mlp}


def leaves(module: RecipeModule, name: str) -> tuple[Tensor, ...]:
    value = module.of_all_groups(name)
    assert value is not None
    return leaves_of(value)


def whole(module: RecipeModule, name: str, what: str) -> Tensor:
    """An attribute of a parameter, such as its gradient, of all groups together."""
    values = [getattr(leaf, what) for leaf in leaves(module, name)]
    return values[0] if len(values) == 1 else torch.stack(values)


def step(module: RecipeModule, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx, the gradients by parameter, buffers."""
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    y = module(leaf, SIZES)
    y.backward(dy)
    assert leaf.grad is not None
    grads = [whole(module, name, "grad") for name in module._shapes]
    return [y.detach(), leaf.grad, *grads, *(buffer.clone() for buffer in module.buffers())]


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        assert torch.equal(ours, theirs)


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(M, K).bfloat16(), torch.randn(M, N).bfloat16()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.kind)
@pytest.mark.parametrize("kind", MAKERS)
def test_bits_of_one_parameter_for_all(kind: str, recipe: Recipe, rng: np.random.Generator) -> None:
    """State dicts go either way round, and then y, every gradient and every buffer are equal (faults.md 38)."""
    single, parted = MAKERS[kind](recipe), MAKERS[kind](recipe, per_group_parameters=True)
    parted.load_state_dict(single.state_dict())
    assert_equal(step(parted, *(given := data())), step(single, *given))
    for leaf in leaves(parted, next(iter(parted._shapes))):
        leaf.data.mul_(2)
    single.load_state_dict(parted.state_dict())
    assert_equal(step(single, *(given := data())), step(parted, *given))
    names = {name for name, _ in parted.named_parameters()}
    assert names >= ({"weight0", "bias2"} if kind == "linear" else {"weight1_0", "weight2_2", "bias1_1"})


@pytest.mark.parametrize("parted", [{"weight"}, {"bias"}, ("weight", "bias"), []], ids=str)
@pytest.mark.parametrize("kind", MAKERS)
def test_weight_and_bias_independently(kind: str, parted: Any, rng: np.random.Generator) -> None:
    """One parameter for all of one kind and one per group of the other: names, state dicts of every form, copies in one
    piece of memory, and the bits."""
    single, mixed = MAKERS[kind](MXFP8()), MAKERS[kind](MXFP8(), per_group_parameters=parted)
    names = {name.rstrip("0123456789_") for name, _ in mixed.named_parameters()}
    assert names == {"weight", "bias"}
    for name in mixed._shapes:
        assert mixed.is_per_group(name) is (name.rstrip("12") in parted)
        assert hasattr(mixed, name) is not mixed.is_per_group(name)
    mixed.load_state_dict(single.state_dict())
    assert_equal(step(mixed, *(given := data())), step(single, *given))
    every = MAKERS[kind](MXFP8(), per_group_parameters=True)
    every.load_state_dict(mixed.state_dict())
    back = copy.deepcopy(mixed).float().bfloat16()
    back.load_state_dict(every.state_dict())
    assert_equal(step(back, *given), step(mixed, *given))
    for name in filter(back.is_per_group, back._shapes):
        assert stacked_view(leaves(back, name)) is not None
    told = repr(mixed)
    assert ("per_group_parameters=True" in told) is (len(parted) == 2)
    assert (f"per_group_parameters={parted}" in told) is (len(parted) == 1)


def test_parameters_lie_stacked_view(rng: np.random.Generator) -> None:
    """After making, casting, copying, saving and assigning, a forward reads them where they are and copies nothing."""
    made = linear(MXFP8(), per_group_parameters=True)
    stream = io.BytesIO()
    torch.save(made.state_dict(), stream)
    stream.seek(0)
    assigned = linear(MXFP8(), per_group_parameters=True)
    assigned.load_state_dict(torch.load(stream, weights_only=True), assign=True)
    loose = linear(MXFP8(), per_group_parameters=True)
    loose.load_state_dict({name: value.clone() for name, value in made.state_dict().items()}, assign=True)
    for module in (made, made.float(), made.bfloat16(), copy.deepcopy(made), assigned, loose):
        for name in ("weight", "bias"):
            parts = leaves(module, name)
            piece = stacked_view(parts)
            assert piece is not None
            assert [part.data_ptr() for part in parts] == [group.data_ptr() for group in piece]
            assert all(isinstance(part, nn.Parameter) and part.is_leaf for part in parts)
    assert_equal(step(copy.deepcopy(made), *(given := data())), step(loose, *given))
    meta = linear(per_group_parameters=True, device="meta")
    meta.to_empty(device="cpu").reset_parameters()
    assert stacked_view(leaves(meta, "weight")) is not None


def test_optimizer_steps_reach_every_group(rng: np.random.Generator) -> None:
    """Adam on G parameters is Adam on one, and the next forward reads what it wrote."""
    single, parted = linear(MXFP8()), linear(MXFP8(), per_group_parameters=True)
    parted.load_state_dict(single.state_dict())
    given = data()
    for module in (single, parted):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        for _ in range(2):
            step(module, *given)
            optimizer.step()
    assert_equal(step(parted, *given), step(single, *given))


@pytest.mark.parametrize("apart", ["one piece", "reversed", "separate"])
@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
def test_main_grad_of_each_group(mode: Any, apart: str, rng: np.random.Generator) -> None:
    """Each parameter's buffer gets its part, wherever it lies; empty groups keep their bits (faults.md 58)."""
    single, parted = linear(MXFP8(), main_grad=mode), linear(MXFP8(), main_grad=mode, per_group_parameters=True)
    parted.load_state_dict(single.state_dict())
    start = torch.randn(G, N, K)
    start[1, 0, 0] = -0.0
    single.weight.main_grad = start.clone()  # type: ignore[attr-defined]
    memory = start.clone() if apart == "one piece" else start.flip(0).contiguous()
    for group, leaf in enumerate(leaves(parted, "weight")):
        buffer = memory[group] if apart == "one piece" else memory[G - 1 - group]
        leaf.main_grad = buffer.clone() if apart == "separate" else buffer  # type: ignore[attr-defined]
    for _ in range(2):
        assert_equal(step(parted, *(given := data())), step(single, *given))
    ours = whole(parted, "weight", "main_grad")
    expected: Tensor = single.weight.main_grad  # type: ignore[attr-defined, assignment]
    assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))
    assert all(leaf.grad_added_to_main_grad for leaf in leaves(parted, "weight"))  # type: ignore[attr-defined]


def test_hooks_of_each_group_fire_once(rng: np.random.Generator) -> None:
    """Post-accumulate hooks see each parameter once, with and without main_grad."""
    for main_grad in (None, "accumulate"):
        layer = linear(main_grad=main_grad, per_group_parameters=True)
        seen: list[Tensor] = []
        for leaf in leaves(layer, "weight"):
            leaf.main_grad = torch.zeros(N, K)  # type: ignore[attr-defined]
            leaf.register_post_accumulate_grad_hook(seen.append)
        step(layer, *data())
        assert sorted(map(id, seen)) == sorted(map(id, leaves(layer, "weight")))


@pytest.mark.parametrize("kind", MAKERS)
def test_quantized_weights_of_each_group(kind: str, rng: np.random.Generator) -> None:
    """Quantized once they give the same bits, a change of one group is seen, and another module's are refused."""
    module = MAKERS[kind](MXFP8(), per_group_parameters=True)
    x, _ = data()
    if isinstance(module, GroupedLinear):
        name, codes = "weight", module.quantize_weight()
    else:
        name, codes = "weights", module.quantize_weights()  # type: ignore[assignment]
    assert torch.equal(module(x, SIZES, **{name: codes}), module(x, SIZES))
    with pytest.raises(ValueError, match="not made by this module"):
        MAKERS[kind](MXFP8(), per_group_parameters=True)(x, SIZES, **{name: codes})
    with torch.no_grad():
        leaves(module, next(iter(module._shapes)))[2].add_(1)
    with pytest.raises(ValueError, match="changed in place"):
        module(x, SIZES, **{name: codes})


def test_a_row_of_operations(rng: np.random.Generator) -> None:
    """Sequential fuses layers of either form alike."""
    models = []
    for parted in (False, True):
        first = GroupedLinear(G, K, 2 * F, recipe=MXFP8(), dtype=torch.bfloat16, per_group_parameters=parted)
        second = GroupedLinear(G, F, N, recipe=MXFP8(), dtype=torch.bfloat16, per_group_parameters=parted)
        models.append(Sequential(first, Activation(), second))
    models[1].load_state_dict(models[0].state_dict())
    x, dy = data()
    made = []
    for model in models:
        y = model(x, SIZES)
        y.backward(dy)
        grads = [whole(layer, "weight", "grad") for layer in (model.operations[0], model.operations[2])]  # type: ignore[arg-type]
        made.append([y.detach(), *grads])
        assert "one grouped_mlp" in model.explain(x, SIZES)
    assert_equal(*made)


def test_a_list_of_tensors_as_weight(rng: np.random.Generator) -> None:
    """The function takes G tensors, in one piece or not, each with its own gradient; results, too; frozen ones."""
    x, dy = data()
    w, b = torch.randn(G, N, K).bfloat16().requires_grad_(), torch.randn(G, N).requires_grad_()
    y = grouped_linear(x, w, SIZES, recipe=None, bias=b)
    expected = torch.autograd.grad(y, (w, b), dy)
    parts = [group.detach().clone().requires_grad_() for group in w]
    biases = [group.detach().clone().requires_grad_() for group in b]
    z = grouped_linear(x, parts, SIZES, recipe=None, bias=biases)
    assert torch.equal(y, z)
    grads = torch.autograd.grad(z, (*parts, *biases), dy)
    assert_equal([torch.stack(grads[:G]), torch.stack(grads[G:])], list(expected))
    parts[1].requires_grad_(False)
    doubled = [2 * part for part in parts]
    (grad,) = torch.autograd.grad(grouped_linear(x, doubled, SIZES, recipe=None), parts[0], dy)
    assert torch.equal(grad, 2 * expected[0][0])
    handle = quantize_weight(tuple(parts), MXFP8())
    assert torch.equal(grouped_linear(x, handle, SIZES, recipe=MXFP8()), grouped_linear(x, w, SIZES, recipe=MXFP8()))


def test_what_does_not_fit_is_refused(rng: np.random.Generator) -> None:
    """Sentences for lists, shapes, frozen groups, and buffers that would lose a gradient."""
    x, _ = data()
    w = [torch.randn(N, K).bfloat16().requires_grad_() for _ in range(G)]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"weight": []}, "weight is empty; give one tensor per group"),
        ({"weight": [*w[:2], 3]}, r"weight\[2\] is a int; give one tensor per group"),
        (
            {"weight": [*w[:2], w[2].T]},
            r"weight\[2\] is bfloat16 \[32, 16\] on cpu and weight\[0\] bfloat16 \[16, 32\]",
        ),
        ({"weight": w[:2]}, "group_sizes has 3 sizes and weight 2 groups"),
        ({"main_grad": "accumulate"}, r"weight\[0\].main_grad is None or absent"),
    ]
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            grouped_linear(**{"x": x, "weight": w, "group_sizes": SIZES, "recipe": None, **changed})
    shared = torch.zeros(N, K)
    for leaf in w:
        leaf.main_grad = shared  # type: ignore[attr-defined]
    y = grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate")
    with pytest.raises(ValueError, match="inside the one from"):
        y.sum().backward()
    w[1].overwrite_main_grad = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="set the same value on all"):
        grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate").sum().backward()
    w[1].requires_grad_(False)
    with pytest.raises(ValueError, match=r"weight\[1\] requires no gradient while others do"):
        grouped_linear(x, w, SIZES, recipe=None, main_grad="accumulate")
    with pytest.raises(ValueError, match=r"per_group_parameters is 1; give True, False, \{'weight'\} or \{'bias'\}"):
        linear(per_group_parameters=1)
    with pytest.raises(ValueError, match=r"per_group_parameters is \{'weights'\}; give True"):
        linear(per_group_parameters={"weights"})
    for wrong_kinds in ("weight", ["weight", "weight1"], {"bias": 1}, [1]):
        with pytest.raises(ValueError, match="per_group_parameters is"):
            linear(per_group_parameters=wrong_kinds)
    half = {name: value for name, value in linear(per_group_parameters=True).state_dict().items() if "2" not in name}
    with pytest.raises(RuntimeError, match="Missing key"):
        linear().load_state_dict(half)


def test_parameters_of_a_dtype_that_autocast_does_not_have(rng: np.random.Generator) -> None:
    """A layer in bf16 is made, and its parts quantized where they lie apart, inside of autocast for fp16."""
    with torch.autocast("cpu", torch.float16):
        made = linear(MXFP8(), per_group_parameters=True)
        apart = [part.detach().clone() for part in leaves(made, "weight")]
        x = torch.randn(M, K, dtype=torch.bfloat16)
        rows = quantize_input(x, apart, SIZES, MXFP8())
        weight = quantize_weight(apart, MXFP8())
        y = grouped_linear(rows, weight, None, recipe=MXFP8())
        assert torch.equal(y, grouped_linear(x, torch.stack([part.half() for part in apart]), SIZES, recipe=MXFP8()))
    assert stacked_view(leaves(made, "weight")) is not None
