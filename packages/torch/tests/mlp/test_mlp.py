"""grouped_mlp and GroupedMLP: the bits of the three operations in a row, and only the gradients asked for."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from octavo import MXFP8, NVFP4, PRESETS, BlockScaling, DelayedScaling, Recipe
from octavo_registry.contract.cards import GATED
from octavo_torch import (
    DelayedState,
    GroupedMLP,
    explain_mlp,
    grouped_linear,
    grouped_mlp,
    quantize_input,
    quantize_weight,
    update_scales,
)
from octavo_torch.compiler.host_reads import watch_host_reads
from octavo_torch.functions.activations import ACTIVATIONS, activate, activate_gradient, probs_gradient
from octavo_torch.mlp import gradients as mlp_gradients

REFERENCE = "torch-reference"
SIZES = [20, 0, 40]
M, K, F, N, G = 70, 64, 48, 80, len(SIZES)
USED = sum(SIZES)
RECIPES: dict[str, Recipe] = {
    **PRESETS,
    "fp8-delayed": DelayedScaling(history=4),
    "fp32 results": BlockScaling(output_dtype="float32"),
    "quantized backward": MXFP8(fprop="high_precision"),
    "quantized wgrad": MXFP8(fprop="high_precision", dgrad="high_precision"),
}
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


def operands(activation: str = "swiglu", dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Fresh leaves, with NaN past the sum."""
    inner = F * (2 if activation in GATED else 1)
    made = {
        "x": torch.randn(M, K).to(dtype),
        "w1": (torch.randn(G, inner, K) / 8).to(dtype),
        "w2": (torch.randn(G, N, F) / 8).to(dtype),
        "probs": torch.rand(M),
        "bias1": torch.randn(G, inner).to(dtype),
        "bias2": torch.randn(G, N).to(dtype),
        "bias2_scales": torch.rand(M),
    }
    for name in ("x", "probs", "bias2_scales"):
        made[name][USED:] = torch.nan
    return {name: value.requires_grad_() for name, value in made.items()}


def states_of(recipe: Recipe) -> tuple[DelayedState, DelayedState] | None:
    if not recipe.stateful:
        return None
    first, second = DelayedState.create(recipe, G), DelayedState.create(recipe, G)  # type: ignore[arg-type]
    for state in (first, second):
        state.scale.copy_(torch.rand(3, G) + 0.5)
    return first, second


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


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    for ours, theirs in zip(left, right, strict=True):
        assert torch.equal(ours, theirs)


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


def make(recipe: Recipe, seed: int = 3) -> GroupedMLP:
    return GroupedMLP(G, K, F, N, bias=True, recipe=recipe, dtype=torch.bfloat16, seed=seed, backend=REFERENCE)


WAYS: dict[str, Any] = {
    "plain": lambda layer, x, p: layer(x, torch.tensor(SIZES), p),
    "reentrant": lambda layer, x, p: checkpoint(layer, x, torch.tensor(SIZES), p, use_reentrant=True),
    "non-reentrant": lambda layer, x, p: checkpoint(layer, x, torch.tensor(SIZES), p, use_reentrant=False),
}


def train(layer: GroupedMLP, forward: Any, data: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """y, gradients and buffers of some steps, each of two microbatches."""
    seen: list[Tensor] = []
    for x, probs, dy in data:
        layer.zero_grad()
        for _ in range(2):
            leaves = x.clone().requires_grad_(), probs.clone().requires_grad_()
            y = forward(layer, *leaves)
            y.backward(dy)
            seen += [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        update_scales(layer)
        seen += [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        seen += [b.clone() for b in layer.buffers()]
    return seen


def batches(steps: int) -> list[tuple[Tensor, ...]]:
    return [(torch.randn(M, K).bfloat16(), torch.rand(M), torch.randn(M, N).bfloat16()) for _ in range(steps)]


KEPT = ("bf16", "fp8-delayed", "nvfp4", "mxfp8-forward-only")


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", KEPT)
def test_activation_checkpointing_changes_no_bit(name: str, way: str, rng: np.random.Generator) -> None:
    """Outputs, gradients, amax histories and seeds are those of a run without (faults.md 42)."""
    layer, data = make(RECIPES[name]), batches(2)
    assert_equal(train(copy.deepcopy(layer), WAYS["plain"], data), train(layer, WAYS[way], data))


@pytest.mark.parametrize("name", KEPT)
def test_save_and_load_resume_bit_for_bit(name: str, rng: np.random.Generator) -> None:
    """A state dict of plain tensors resumes exactly, and does not grow; so does a pickled copy (faults.md 47, 48)."""
    layer, data = make(RECIPES[name]), batches(3)
    train(layer, WAYS["plain"], data[:1])
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    size = stream.tell()
    stream.seek(0)
    loaded = make(RECIPES[name], seed=99)
    loaded.load_state_dict(torch.load(stream, weights_only=True))
    unpickled = pickle.loads(pickle.dumps(layer))
    expected = train(layer, WAYS["plain"], data[1:])
    assert_equal(train(loaded, WAYS["plain"], data[1:]), expected)
    assert_equal(train(unpickled, WAYS["plain"], data[1:]), expected)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    assert stream.tell() == size


@pytest.mark.parametrize("name", ["bf16", "fp8-delayed", "nvfp4"])
def test_one_graph_with_the_bits_of_eager(name: str, rng: np.random.Generator) -> None:
    """fullgraph forward and backward, other sizes without compiling again, state and seeds kept in step."""
    layer, data = make(RECIPES[name]), batches(1)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    theirs = train(copy.deepcopy(layer), WAYS["plain"], data)
    assert_equal(train(layer, lambda _, x, p: compiled(x, torch.tensor(SIZES), p), data), theirs)
    compiled(data[0][0], torch.tensor([0, M, 0]), data[0][1])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_module_says_what_it_is(rng: np.random.Generator) -> None:
    """repr, parameters, casts that leave scales fp32, eval that records nothing, weights quantized once."""
    layer = make(RECIPES["fp8-delayed"])
    assert "hidden_features=48, out_features=80, activation=swiglu, bias=True, recipe=delayed" in repr(layer)
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "weight1": (G, 2 * F, K),
        "bias1": (G, 2 * F),
        "weight2": (G, N, F),
        "bias2": (G, N),
        "amax_history": (2, 3, 4, G),
        "encode_scale": (2, 3, G),
    }
    layer.bfloat16().eval()
    assert layer.encode_scale.dtype is torch.float32
    x = torch.randn(M, K).bfloat16()
    y = layer(x, SIZES)
    assert not layer.amax_history.any()
    assert torch.equal(layer(x, SIZES, weights=layer.quantize_weights()), y)
    with pytest.raises(ValueError, match="weights were not made by this module"):
        layer(x, SIZES, weights=make(RECIPES["fp8-delayed"]).quantize_weights())
    assert GroupedMLP(2, 8, 6, activation="relu2").weight1.shape == (2, 6, 8)


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
    assert (mixed.act.codes, mixed.act.array, mixed.dact.codes, mixed.dact.array) == (True, False, True, True)


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


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def watched(monkeypatch: pytest.MonkeyPatch, saved: list[Tensor]) -> list[tuple[str, int]]:
    """Bytes of `saved` when each quantizer and weight gradient of a backward begins, by operand."""
    seen: list[tuple[str, int]] = []
    quantize, wgrad = mlp_gradients.quantize_operand, mlp_gradients.weight_gradient

    def quantizing(call: Any, run: Any, operand: Any, value: Tensor, seed: Any) -> Any:
        seen.append(("quantize", bytes_of(saved)))
        return quantize(call, run, operand, value, seed)

    def multiplying(call: Any, run: Any, x: Any, *rest: Any) -> Any:
        seen.append(("wgrad", bytes_of(saved)))
        return wgrad(call, run, x, *rest)

    monkeypatch.setattr(mlp_gradients, "quantize_operand", quantizing)
    monkeypatch.setattr(mlp_gradients, "weight_gradient", multiplying)
    return seen


def planes_freed(recipe: Recipe, given: dict[str, Tensor], **rest: Any) -> tuple[list[Tensor], Tensor]:
    y = grouped_mlp(**given, group_sizes=SIZES, recipe=recipe, seed=1, backend=REFERENCE, **rest)
    return y.grad_fn.saved_tensors, y  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_codes_are_freed_as_soon_as_they_are_read(
    name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In backward the activation's codes go after fc2's weight gradient, fc2's weight after its dgrad, fc1's result
    after the activation's gradient, fc1's weight after dx, though autograd holds the tensors to the end."""
    recipe, given = PRESETS[name], operands()
    saved, y = planes_freed(recipe, given)
    before = bytes_of(saved)
    seen = watched(monkeypatch, saved)
    y.backward(torch.ones_like(y))
    assert [what for what, _ in seen] == ["quantize", "wgrad", "quantize", "wgrad"]
    left = [count for _, count in seen]
    assert left[0] == left[1] == before
    a, w2, w1, h = M * F, given["w2"].numel(), given["w1"].numel(), M * 2 * F * 2
    # the reference backend has a byte or more for each code
    assert left[2] <= before - a - w2
    assert left[3] <= before - a - w2 - w1 - h


def test_what_somebody_else_reads_is_not_freed(rng: np.random.Generator) -> None:
    """A retained graph gives the same gradients again; codes of quantize_weight and quantize_input, operands of a
    high-precision slot and those of a postponed weight gradient stay."""
    given = operands()
    saved, y = planes_freed(MXFP8(), given)
    before = bytes_of(saved)
    dy = torch.randn(M, N).bfloat16()
    first = torch.autograd.grad(y, list(given.values()), dy, retain_graph=True)
    assert bytes_of(saved) == before
    assert_equal(list(first), list(torch.autograd.grad(y, list(given.values()), dy)))
    assert bytes_of(saved) < before
    handles = {name: quantize_weight(given[name], MXFP8(), backend=REFERENCE) for name in ("w1", "w2")}
    x = quantize_input(given["x"], given["w1"], SIZES, MXFP8(), backend=REFERENCE)
    for _ in range(2):
        again = grouped_mlp(
            **{**given, **handles, "x": x}, group_sizes=None, recipe=MXFP8(), backend=REFERENCE
        )  # fmt: skip
        assert_equal(list(first), list(torch.autograd.grad(again, list(given.values()), dy)))
    mixed = MXFP8(wgrad="high_precision", dgrad="high_precision")
    expected = None
    for _ in range(2):
        y = grouped_mlp(**given, group_sizes=SIZES, recipe=mixed, backend=REFERENCE)
        grads = list(torch.autograd.grad(y, list(given.values()), dy))
        expected = expected or grads
        assert_equal(grads, expected)
    made = []
    for delay in (False, True):
        layer = GroupedMLP(G, K, F, N, recipe=MXFP8(), dtype=torch.bfloat16, delay_wgrad=delay, backend=REFERENCE)
        with torch.no_grad():
            layer.weight1.copy_(given["w1"])
            layer.weight2.copy_(given["w2"])
        layer(given["x"].detach(), SIZES, given["probs"].detach()).backward(dy)
        if delay:
            layer.backward_dw()
        made.append([layer.weight1.grad, layer.weight2.grad])
    assert_equal(*made)  # type: ignore[arg-type]


def test_a_backward_that_was_broken_off_says_so(rng: np.random.Generator) -> None:
    """Run again, it has nothing to read any more; a new forward works."""
    layer = GroupedMLP(G, K, F, N, recipe=MXFP8(), dtype=torch.bfloat16, main_grad="accumulate", backend=REFERENCE)
    for weight in (layer.weight1, layer.weight2):
        weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    x = operands()["x"]
    y = layer(x, SIZES)
    layer.weight1.get_main_grad = lambda: None  # type: ignore[attr-defined]
    for kind, sentence in ((ValueError, r"get_main_grad\(\) is None"), (RuntimeError, "was broken off by an error")):
        with pytest.raises(kind, match=sentence):
            y.sum().backward()
    layer.weight1.get_main_grad = lambda: layer.weight1.main_grad  # type: ignore[attr-defined]
    layer(x, SIZES).sum().backward()
    assert layer.weight1.main_grad.any()  # type: ignore[attr-defined]


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
