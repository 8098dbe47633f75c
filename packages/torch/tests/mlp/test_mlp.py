"""grouped_mlp: the bits of the three operations in a row, only the gradients asked for, and what is said of it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from mlp_operands import RECIPES, REFERENCE, SIZES, USED, F, G, K, M, N, assert_equal, operands, states_of
from torch import Tensor

from octavo import MXFP8, NVFP4, DelayedScaling, Recipe
from octavo_registry.contract.cards import GATED
from octavo_torch import DelayedState, explain_mlp, grouped_linear, grouped_mlp, quantize_weight
from octavo_torch.compiler.host_reads import watch_host_reads
from octavo_torch.functions.activations import ACTIVATIONS, activate, activate_gradient, probs_gradient

NAMES = ("x", "w1", "w2", "probs", "bias1", "bias2", "bias2_scales")


class Activation(torch.autograd.Function):
    """The activation times probabilities, apart: what the fused operations are held to."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, probs: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(h, probs)
        ctx.name = name
        made: Tensor = activate(h, probs, name)
        return made

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, probs = ctx.saved_tensors
        dy = dy.to(h.dtype)
        return activate_gradient(dy, h, probs, ctx.name), probs_gradient(dy, h, ctx.name), None


def composed(given: dict[str, Tensor], recipe: Recipe, activation: str, seed: int, states: Any) -> Tensor:
    """The same from grouped_linear, the activation, and grouped_linear."""
    inner = recipe
    if recipe.output_dtype is not None:
        inner = type(recipe)(**{**recipe.model_dump(), "output_dtype": None})
    first, second = states or (None, None)
    h = grouped_linear(
        given["x"], given["w1"], SIZES, recipe=inner, bias=given["bias1"], seed=seed, state=first, backend=REFERENCE
    )
    a = Activation.apply(h, given["probs"], activation)
    return grouped_linear(
        a, given["w2"], SIZES, recipe=recipe, bias=given["bias2"], bias_scales=given["bias2_scales"],
        seed=seed ^ (1 << 63), state=second, backend=REFERENCE,
    )  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_bits_of_the_three_operations(name: str, rng: np.random.Generator) -> None:
    """y, all gradients and the states of every recipe; tails of NaN change nothing (faults.md 1, 8, 10, 11, 12, 14)."""
    recipe, given = RECIPES[name], operands()
    activation = str(rng.choice(ACTIVATIONS))
    if activation not in GATED:
        given = operands(activation)
    seed = int(rng.integers(0, 1 << 62))
    states = states_of(recipe)
    twins = copy.deepcopy(states)
    leaves = list(given.values())
    y = grouped_mlp(
        group_sizes=SIZES, activation=activation, recipe=recipe, seed=seed, state=states, backend=REFERENCE, **given
    )
    dy = torch.randn(M, N).to(y.dtype)
    dy[USED:] = torch.nan
    grads = torch.autograd.grad(y, leaves, dy)
    expected = composed(given, recipe, activation, seed, twins)
    assert y.dtype is expected.dtype
    assert_equal([y, *grads], [expected, *torch.autograd.grad(expected, leaves, dy)])
    for grad, leaf in zip(grads, leaves, strict=True):
        assert grad.dtype is leaf.dtype
        assert bool(grad.isfinite().all())
    assert torch.equal(y[USED:], torch.zeros(M - USED, N, dtype=y.dtype))
    for row in (grads[0], grads[3], grads[6]):
        assert not row[USED:].any()
    for weight in grads[1], grads[2], grads[4], grads[5]:
        assert not weight[1].any()
    for state, twin in zip(states or (), twins or (), strict=True):
        assert torch.equal(state.history, twin.history)
        assert state.history[:, 0].any(1).all()


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "quantized wgrad"])
def test_only_what_is_asked_for(name: str, rng: np.random.Generator) -> None:
    """The gradient of one argument alone is that of all of them, no other is made, and no activation is kept for it."""
    given, dy = operands(), torch.randn(M, N).bfloat16()
    call = {"group_sizes": SIZES, "recipe": RECIPES[name], "backend": REFERENCE}
    every = dict(zip(NAMES, torch.autograd.grad(grouped_mlp(**given, **call), list(given.values()), dy), strict=True))
    for wanted in NAMES:
        alone = {name: value.detach().requires_grad_(name == wanted) for name, value in given.items()}
        saved: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: (s.append(tuple(t.shape)), t)[1], lambda t: t):
            y = grouped_mlp(**alone, **call)
        y.backward(dy)
        assert [name for name, leaf in alone.items() if leaf.grad is not None] == [wanted]
        grad = alone[wanted].grad
        assert grad is not None
        assert torch.equal(grad, every[wanted])
        assert ((M, K) in saved) == (wanted == "w1")
        if wanted in ("bias2", "bias2_scales"):
            assert (M, 2 * F) not in saved
    with torch.no_grad():
        assert torch.equal(grouped_mlp(**given, **call), y)


def test_no_value_is_read(rng: np.random.Generator) -> None:
    """With sizes in a tensor, forward and backward read no value of it but the check of host sizes (faults.md 36)."""
    given, sizes = operands(), torch.tensor(SIZES)
    with watch_host_reads() as reads:
        grouped_mlp(**given, group_sizes=sizes, recipe=NVFP4(), seed=3, backend=REFERENCE).sum().backward()
    single = list(reads)
    reads.clear()
    with watch_host_reads() as reads:
        h = grouped_linear(given["x"], given["w1"], sizes, recipe=NVFP4(), seed=3, backend=REFERENCE)
        grouped_linear(h[:, :F], given["w2"], sizes, recipe=NVFP4(), seed=3, backend=REFERENCE).sum().backward()
    assert set(single) <= set(reads)


def test_quantized_weights_and_main_grad(rng: np.random.Generator) -> None:
    """Weights quantized once give the same bits; both weights' gradients go into their buffers."""
    given, recipe = operands(), MXFP8()
    call = {"group_sizes": SIZES, "recipe": recipe, "backend": REFERENCE}
    y = grouped_mlp(**given, **call)
    grads = torch.autograd.grad(y.sum(), [given["w1"], given["w2"]])
    handles = {name: quantize_weight(given[name], recipe, backend=REFERENCE) for name in ("w1", "w2")}
    assert torch.equal(grouped_mlp(**{**given, **handles}, **call), y)
    for name in ("w1", "w2"):
        given[name].main_grad = torch.ones(given[name].shape)  # type: ignore[attr-defined]
    grouped_mlp(**given, **call, main_grad="accumulate").sum().backward()
    for name, grad in zip(("w1", "w2"), grads, strict=True):
        weight: Any = given[name]
        torch.testing.assert_close(weight.main_grad, 1 + grad.float(), rtol=2**-8, atol=2**-8)
        assert not weight.grad.any()
        assert weight.grad_added_to_main_grad


def test_what_is_fused(rng: np.random.Generator) -> None:
    """The plan says, for each quantizer between the layers, who fuses it or why nobody does."""
    given = operands()
    call = {"group_sizes": SIZES, "activation": "geglu", "backend": REFERENCE}
    weights = given["x"], given["w1"], given["w2"]
    plan = explain_mlp(*weights, recipe=MXFP8(), **call)
    assert "torch-reference: serves" in plan.act.why
    assert "composed: no backend serves dact_quantize" in str(plan)
    assert "geglu: composed" in str(explain_mlp(*weights, recipe=None, **call))
    mixed = explain_mlp(*weights, recipe=MXFP8(wgrad="high_precision"), **call)
    assert (mixed.act.codes, mixed.act.high_precision) == (True, False)
    assert (mixed.dact.codes, mixed.dact.high_precision) == (True, True)


def test_messages(rng: np.random.Generator) -> None:
    """Errors name the argument, what was given, and what is needed."""
    given = {name: value.detach() for name, value in operands().items()}
    w1, w2 = given["w1"], given["w2"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"activation": "tanh"}, "activation is 'tanh'; give one of silu, gelu"),
        ({"w1": w1[:, 1:]}, r"w1's result has 95 columns and swiglu reads a gate and an up projection"),
        ({"w2": w2[:, :, 1:]}, r"swiglu makes 48 features of w1's 96, so give w2 \[3, N, 48\]"),
        ({"w2": w2[:2]}, "w1 has 3 groups and w2 2"),
        ({"w2": w2.float()}, "x has dtype bfloat16 and w2 float32"),
        ({"x": given["x"][:, 1:]}, "x has 63 features and w1 has shape"),
        ({"probs": given["probs"].bfloat16()}, "probs has dtype bfloat16; give float32"),
        ({"probs": given["probs"][1:]}, r"probs has shape \[69\]; give \[70\]"),
        ({"bias1": given["bias2"]}, r"bias1 has shape \[3, 80\]; give \[3, 96\]"),
        ({"bias2": None}, "bias2_scales was given without bias2"),
        ({"group_sizes": [1, 2]}, "group_sizes has 2 sizes"),
        ({"recipe": NVFP4(), "x": given["x"].clone().requires_grad_()}, "seed is None"),
        ({"recipe": DelayedScaling()}, "state is None and DelayedScaling"),
        ({"recipe": DelayedScaling(), "state": DelayedState.create(DelayedScaling(), G)}, "give two DelayedStates"),
        ({"state": states_of(DelayedScaling())}, "state was given and HighPrecision keeps none"),
        ({"main_grad": "add", "w1": w1.clone().requires_grad_()}, "main_grad is 'add'"),
    ]
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            grouped_mlp(**{"group_sizes": SIZES, "recipe": None, "backend": REFERENCE, **given, **changed})


@pytest.mark.parametrize(("rows", "sizes"), [(0, [0, 0, 0]), (M, [0, 0, 0]), (M, [0, M, 0])])
def test_no_rows_at_all(rows: int, sizes: list[int], rng: np.random.Generator) -> None:
    """Neither rows nor groups with some are no special case: gradients of weights are zero (faults.md 1 to 7)."""
    given = operands()
    for name in ("x", "probs", "bias2_scales"):
        given[name] = given[name].detach()[:rows].nan_to_num().requires_grad_()
    y = grouped_mlp(**given, group_sizes=sizes, recipe=MXFP8())
    grads = torch.autograd.grad(y.sum(), list(given.values()))
    assert y.shape == (rows, N)
    assert all(bool(grad.isfinite().all()) for grad in grads)
    if not sum(sizes):
        assert not any(bool(grad.any()) for grad in (y, *grads))


@pytest.mark.parametrize("lead", [(2, 35), (70,), (5, 2, 7), (0, 3)], ids=str)
def test_leading_axes(lead: tuple[int, ...], rng: np.random.Generator) -> None:
    """x [..., K], probs and bias2_scales [...], out and grad_input: the bits of the rows [M, K], in x's axes."""
    given = operands()
    sizes = SIZES if 0 not in lead else [0] * G
    rows = int(np.prod(lead))
    plain = {
        name: value[:rows].detach() if name in ("x", "probs", "bias2_scales") else value.detach()
        for name, value in given.items()
    }
    shaped = dict(plain)
    for name in ("x", "probs", "bias2_scales"):
        shaped[name] = plain[name].reshape(*lead, *plain[name].shape[1:])
    made = []
    for arguments in (plain, shaped):
        leaves = {name: value.clone().requires_grad_() for name, value in arguments.items()}
        axes = leaves["probs"].shape
        out, grad_input = torch.empty(*axes, N).bfloat16(), torch.empty(*axes, K).bfloat16()
        y = grouped_mlp(
            **leaves, group_sizes=sizes, recipe=MXFP8(), backend=REFERENCE, out=out, grad_input=grad_input
        )  # fmt: skip
        assert y.shape == (*axes, N)
        y.backward(torch.ones_like(y))
        grads = [leaf.grad for leaf in leaves.values()]
        assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves.values()]  # type: ignore[union-attr]
        made.append([value.flatten() for value in (y.detach(), out, grad_input, *grads)])  # type: ignore[union-attr]
    assert_equal(*made)
    plan = explain_mlp(shaped["x"], given["w1"], given["w2"], sizes, recipe=MXFP8())
    assert str(plan) == str(explain_mlp(plain["x"], given["w1"], given["w2"], sizes, recipe=MXFP8()))
