"""Delayed weight gradients: the bits of backward's, whatever they go to, in the order and at the time of the caller."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from octavo import MXFP8, NVFP4, PRESETS, DelayedScaling
from octavo_torch import Activation, DelayedWgrad, GroupedLinear, GroupedMLP, MoE, Sequential, grouped_linear
from octavo_torch.arrays.per_group import leaves_of
from octavo_torch.scaling.recipe_module import RecipeModule
from octavo_torch.wgrad.postponed import _running_number

SIZES = torch.tensor([20, 0, 40])
M, K, F, N, G = 70, 32, 48, 16, len(SIZES)
RECIPES = {
    "mxfp8": MXFP8(),
    "delayed": DelayedScaling(history=3),
    "nvfp4": NVFP4(),
    "wgrad unquantized": MXFP8(wgrad="high_precision"),
    "bf16": PRESETS["bf16"],
}


def make(kind: str, recipe: Any = None, **rest: Any) -> RecipeModule:
    given = {"bias": True, "recipe": recipe, "dtype": torch.bfloat16, "seed": 1, **rest}
    return GroupedLinear(G, K, N, **given) if kind == "linear" else GroupedMLP(G, K, F, N, **given)


def weights(module: RecipeModule) -> list[Tensor]:
    names = [name for name in module._shapes if name.startswith("weight")]
    return [leaf for name in names for leaf in leaves_of(module.of_all_groups(name))]  # type: ignore[arg-type]


def give_buffers(module: RecipeModule) -> None:
    for leaf in weights(module):
        leaf.main_grad = torch.ones(leaf.shape)  # type: ignore[attr-defined]
        leaf.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(M, K).bfloat16(), torch.randn(M, N).bfloat16()


def passes(module: RecipeModule, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Forward and backward of each microbatch: dx, and what backward leaves for the biases."""
    seen = []
    for x, dy in batches:
        leaf = x.clone().requires_grad_()
        module(leaf, SIZES).backward(dy)
        assert leaf.grad is not None
        seen.append(leaf.grad)
    return [*seen, *(buffer.clone() for buffer in module.buffers())]


def gathered(module: RecipeModule) -> list[Tensor]:
    """Every gradient and every main_grad."""
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return [*grads, *(leaf.main_grad for leaf in weights(module) if hasattr(leaf, "main_grad"))]  # type: ignore[attr-defined]


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("parted", [False, True], ids=["single", "per group"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("main_grad", [None, "accumulate", "overwrite"])
def test_the_whole_table(main_grad: Any, microbatches: int, parted: bool, kind: str, rng: np.random.Generator) -> None:
    """{none, accumulate, overwrite} x microbatches x {single, per group}: later, and with the bits of at once; without
    main_grad a gradient that is there already is added to; the flag is set when the work is there."""
    for name, recipe in RECIPES.items() if (main_grad, microbatches) == (None, 2) else [("mxfp8", RECIPES["mxfp8"])]:
        at_once = make(kind, recipe, main_grad=main_grad, per_group_parameters=parted)
        later = make(kind, recipe, main_grad=main_grad, per_group_parameters=parted, delay_wgrad=True)
        later.load_state_dict(at_once.state_dict())
        batches = [data() for _ in range(microbatches)]
        for module in (at_once, later):
            if main_grad is not None:
                give_buffers(module)
            for leaf in weights(module):
                leaf.grad = torch.ones_like(leaf)
        assert_equal(passes(later, batches), passes(at_once, batches))
        assert len(later.delayed_wgrad) == microbatches, name  # type: ignore[arg-type]
        assert all(bool((leaf.grad == 1).all()) for leaf in weights(later))
        assert main_grad is None or all(not leaf.grad_added_to_main_grad for leaf in weights(later))  # type: ignore[attr-defined]
        later.backward_dw()
        assert len(later.delayed_wgrad) == 0  # type: ignore[arg-type]
        assert_equal(gathered(later), gathered(at_once))
        assert main_grad is None or all(leaf.grad_added_to_main_grad for leaf in weights(later))  # type: ignore[attr-defined]
        later.backward_dw()
        assert_equal(gathered(later), gathered(at_once))


@pytest.mark.parametrize("main_grad", [None, "accumulate"])
def test_hooks_fire_once_when_the_gradient_arrives(main_grad: Any, rng: np.random.Generator) -> None:
    """Hooks of DDP's and FSDP's kinds: on the tensor, after accumulation, and on autograd's node; not in backward."""
    for parted in (False, True):
        layer = make("linear", MXFP8(), main_grad=main_grad, delay_wgrad=True, per_group_parameters=parted)
        give_buffers(layer)
        leaves = weights(layer)
        seen: list[str] = []
        nodes = [leaf.expand_as(leaf).grad_fn.next_functions[0][0] for leaf in leaves]  # type: ignore[union-attr]
        for leaf, node in zip(leaves, nodes, strict=True):
            leaf.register_hook(lambda _, seen=seen: seen.append("tensor"))
            leaf.register_post_accumulate_grad_hook(lambda _, seen=seen: seen.append("after"))
            node.register_hook(lambda *_, seen=seen: seen.append("node"))
        for count in (1, 2):
            passes(layer, [data()])
            assert len(seen) == 3 * (count - 1) * len(leaves)
            layer.backward_dw()
            assert len(seen) == 3 * count * len(leaves)
        assert {*seen} == {"tensor", "after", "node"}


def test_some_of_the_microbatches(rng: np.random.Generator) -> None:
    """`count` takes the oldest; more than there are is refused, as is a module without delay_wgrad."""
    layer, twin = make("mlp", MXFP8(), delay_wgrad=True), make("mlp", MXFP8())
    twin.load_state_dict(layer.state_dict())
    batches = [data() for _ in range(3)]
    passes(layer, batches)
    for upto in (1, 3):
        layer.backward_dw(1 if upto == 1 else 2)
        twin.zero_grad()
        passes(twin, batches[:upto])
        assert_equal([leaf.grad for leaf in weights(layer)], [leaf.grad for leaf in weights(twin)])  # type: ignore[misc]
    with pytest.raises(ValueError, match="count is 1 and 0 backward passes have postponed weight gradients"):
        layer.backward_dw(1)
    with pytest.raises(ValueError, match="delay_wgrad is False and backward postpones no weight gradient"):
        twin.backward_dw()


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_two_backward_passes_of_one_forward(kind: str, rng: np.random.Generator) -> None:
    """A retained graph's passes are told apart, though they have one forward: `count` takes one of them."""
    layer, twin = make(kind, MXFP8(), delay_wgrad=True), make(kind, MXFP8())
    twin.load_state_dict(layer.state_dict())
    x, dy = data()
    for module in (layer, twin):
        y = module(x, SIZES)
        y.backward(dy, retain_graph=True)
        if module is layer:
            y.backward(dy)
    assert len(layer.delayed_wgrad) == 2  # type: ignore[arg-type]
    layer.backward_dw(1)
    assert_equal([leaf.grad for leaf in weights(layer)], [leaf.grad for leaf in weights(twin)])  # type: ignore[misc]
    assert len(layer.delayed_wgrad) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_activation_checkpointing(reentrant: bool, rng: np.random.Generator) -> None:
    """Forward runs twice, one gradient is left."""
    layer, twin = make("linear", NVFP4(), delay_wgrad=True), make("linear", NVFP4())
    twin.load_state_dict(layer.state_dict())
    x, dy = data()
    checkpoint(layer, x.clone().requires_grad_(), SIZES, use_reentrant=reentrant).backward(dy)
    assert len(layer.delayed_wgrad) == 1  # type: ignore[arg-type]
    layer.backward_dw()
    passes(twin, [(x, dy)])
    assert_equal(gathered(layer), gathered(twin))


def test_later_and_inside_of_autocast(rng: np.random.Generator) -> None:
    """Buffers in bf16 that lie apart, one per group, of a gradient that is computed where autocast is on for fp16."""
    x, dy = data()
    parts = [torch.randn(N, K).bfloat16().requires_grad_() for _ in range(G)]
    found = []
    for enabled in (True, False):
        for part in parts:
            part.main_grad = torch.ones_like(part)  # type: ignore[attr-defined]
        store = DelayedWgrad()
        grouped_linear(x, parts, SIZES, recipe=MXFP8(), main_grad="accumulate", delayed_wgrad=store).backward(dy)
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            store.backward_dw()
        found.append([part.main_grad for part in parts])  # type: ignore[attr-defined]
    assert_equal(*found)


def test_a_row_of_operations(rng: np.random.Generator) -> None:
    """Sequential's layers, fused, and not."""
    made = []
    for delay in (False, True):
        torch.manual_seed(3)
        first = GroupedLinear(G, K, 2 * F, dtype=torch.bfloat16, delay_wgrad=delay)
        second = GroupedLinear(G, F, N, dtype=torch.bfloat16)
        model = Sequential(first, Activation(), second, GroupedLinear(G, N, N, dtype=torch.bfloat16, delay_wgrad=delay))
        x = torch.randn(M, K).bfloat16()
        model(x, SIZES).sum().backward()
        if delay:
            assert second.weight.grad is not None
            assert first.weight.grad is None
            model.backward_dw()
        made.append([parameter.grad for parameter in model.parameters()])
    assert_equal(*made)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no operation has delay_wgrad=True"):
        Sequential(second).backward_dw()


def test_the_function_and_what_it_reads(rng: np.random.Generator) -> None:
    """One object for many calls; nothing is kept where no weight gradient is asked for; operands that change are seen;
    results of operations are refused; copies and pickles start empty."""
    later = DelayedWgrad()
    x, dy = data()
    x.requires_grad_()
    w = torch.randn(G, N, K).bfloat16().requires_grad_()
    y = grouped_linear(x, w, SIZES, recipe=None, delayed_wgrad=later)
    torch.autograd.grad(y, x, dy, retain_graph=True)
    y.backward(dy, inputs=[x], retain_graph=True)
    assert torch.autograd.grad(y, w, dy, allow_unused=True, retain_graph=True) == (None,)
    assert len(later) == 0
    y.backward(dy)
    assert len(later) == len(copy.deepcopy([later])[0]) + 1 == len(pickle.loads(pickle.dumps(later))) + 1
    dy.mul_(2)
    with pytest.raises(ValueError, match=r"shape \[70, 16\] that a delayed weight gradient reads has changed in place"):
        later.backward_dw()
    with torch.no_grad():
        grouped_linear(x, w, SIZES, recipe=None, delayed_wgrad=later)
    with pytest.raises(ValueError, match="delayed_wgrad was given and weight is the result of an operation"):
        grouped_linear(x, 2 * w, SIZES, recipe=None, delayed_wgrad=later)
    with pytest.raises(ValueError, match="delayed_wgrad is a bool; give a DelayedWgrad, or None"):
        grouped_linear(x, w, SIZES, recipe=None, delayed_wgrad=True)  # type: ignore[arg-type]
    assert "delay_wgrad=True" in repr(make("linear", delay_wgrad=True))


@pytest.mark.parametrize("kind", ["linear", "mlp", "moe"])
def test_gradients_that_no_backward_postponed_are_missed(kind: str, rng: np.random.Generator) -> None:
    """A zero-bubble schedule asks for x's gradient, then for those of the leaves in the graph, where the weights are
    not: backward_dw had computed nothing, and experts had not trained. A backward of the same pass makes up for it."""
    layer = MoE(G, K, N, 2, recipe=None, delay_wgrad=True) if kind == "moe" else make(kind, delay_wgrad=True)
    x = torch.randn(M, K, dtype=weights(layer)[0].dtype, requires_grad=True)
    sizes = () if kind == "moe" else (SIZES,)
    y = layer(x, *sizes)
    dy = torch.randn_like(y)
    torch.autograd.grad(y, x, dy, retain_graph=True)
    torch.autograd.grad(y, [p for p in layer.parameters() if p.requires_grad], dy, retain_graph=True, allow_unused=True)
    told = f"^{1 if kind == 'linear' else 2} weight gradients were not postponed: .* Leave delay_wgrad out under such"
    with pytest.raises(ValueError, match=told):
        layer.backward_dw()
    layer.backward_dw()
    torch.autograd.grad(y, x, dy, retain_graph=True)
    y.backward(dy)
    layer.backward_dw()
    assert all(weight.grad is not None for weight in weights(layer))


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_backward_that_an_error_broke_off(kind: str, rng: np.random.Generator) -> None:
    """Out of memory in a layer before this one, the batch is left out, and its gradients were added to the next one's:
    zero_grad does not reach them. They are refused until they are dropped."""

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            raise torch.OutOfMemoryError

    layer, other = (make(kind, MXFP8(), delay_wgrad=True) for _ in range(2))
    other.load_state_dict(layer.state_dict())
    (first, dy), (second, _) = data(), data()
    layer(first, SIZES).backward(dy)
    with pytest.raises(torch.OutOfMemoryError):
        layer(Breaks.apply(second.requires_grad_()), SIZES).backward(dy)  # type: ignore[no-untyped-call]
    layer.backward_dw(count=1)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^an error broke off a backward pass .*; drop them by .*clear\(\), zero"):
            layer.backward_dw()
    assert layer.delayed_wgrad is not None
    layer.delayed_wgrad.clear()
    assert not len(layer.delayed_wgrad)
    layer.zero_grad()
    for each in (layer, other):
        each(first, SIZES).backward(dy)
        each.backward_dw()
    assert_equal(gathered(layer), gathered(other))


def test_a_compiled_backward_is_not_asked_how_it_ends() -> None:
    """Compiled autograd traces what postpones, and knows nothing of autograd's own engine."""
    torch.compiler.reset()
    known = torch.compile(lambda x: x + _running_number(), backend="eager", fullgraph=True)
    assert known(torch.zeros(())) == -1
    torch.compiler.reset()


def test_one_graph_is_refused(rng: np.random.Generator) -> None:
    """torch.compile says why under fullgraph=True; outside the graph, main_grad's test covers it."""
    layer = make("linear", MXFP8(), delay_wgrad=True)
    torch.compiler.reset()
    with pytest.raises(Exception, match="main_grad or delayed_wgrad was given, and a traced backward can neither"):
        torch.compile(layer, backend="eager", fullgraph=True)(data()[0], SIZES)
    torch.compiler.reset()
