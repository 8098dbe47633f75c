"""MXFP4Weights in every layer: forward and backward are those of blocks of the rounded weight, gradients go straight
through, and codes, masters, sampled counts and checkpoints are of the same values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from code_planes import planes
from moe_layers import assert_equal, draw
from torch import Tensor, nn

import octavo_torch
from octavo import BlockScaling, MXFP4Weights, QuantizerSpec
from octavo_numerics import quantize, round_mxfp4, tensor_stats, valid
from octavo_torch import (
    CodedWeight,
    GroupedLinear,
    GroupedMLP,
    MasterWeights,
    grouped_linear,
    grouped_mlp,
    moe_mlp,
    observe,
    quantize_weight,
    quantized_parameters,
)
from octavo_torch.arithmetic import operators
from octavo_torch.bridge import BRIDGE

REFERENCE = "torch-reference"
G, K, F, N = 3, 160, 96, 136
SIZES = [5, 0, 9]
WAYS = {"rowwise": "columnwise", "columnwise": "rowwise"}
SPEC = MXFP4Weights().quantizer("w")
assert SPEC is not None


def rounded(w: Tensor) -> Tensor:
    """The definition's values of w [G, N, K], in w's dtype, which holds them here."""
    values = torch.from_numpy(round_mxfp4(BRIDGE.to_numpy(w.detach().float()))).to(w.dtype)
    return values.requires_grad_(w.requires_grad)


def weight(dtype: torch.dtype, *shape: int) -> Tensor:
    """Of blocks that E4M3 holds, and of some that it does not."""
    w = torch.randn(*shape) / 8
    w[:, 3:7, :32] *= 2.0**-18
    return w.to(dtype).requires_grad_()


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_values_are_those_of_the_definition(direction: Any, rng: np.random.Generator) -> None:
    """Of any fp32 pattern and of sides that end inside of blocks: bits, with the signs of zeros; in pieces, too."""
    for shape in ((3, 130, 200), (1, 4097, 40), (2, 1, 1), (2, 0, 32), (2, 32, 0)):
        bits = rng.integers(0, 1 << 32, shape, np.uint32)
        bits[-1] &= np.uint32(0x80FFFFFF)
        bits[:, ::2] = np.where(bits[:, ::2] & 0x7F800000 == 0x7F800000, bits[:, ::2] & 0x807FFFFF, bits[:, ::2])
        w = bits.view(np.float32)
        wanted = round_mxfp4(w, direction)
        ours = operators.mxfp4_values(torch.from_numpy(w), None, direction).float().numpy()
        turned = operators.mxfp4_values(torch.from_numpy(w.swapaxes(1, 2)), None, WAYS[direction])
        sizes = torch.full((shape[0],), shape[1])
        ragged = operators.mxfp4_values(torch.from_numpy(w).flatten(0, 1), sizes, direction).float().numpy()
        for made in (ours, turned.float().numpy().swapaxes(1, 2), ragged.reshape(shape)):
            assert np.array_equal(np.isnan(made), np.isnan(wanted))
            same = made.view(np.uint32) == wanted.view(np.uint32)
            assert (same | np.isnan(wanted)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_is_that_of_blocks_of_the_rounded_weight(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """y, dx and dw have block's bits for the rounded weight, whatever slots are: dw is the master's, as it is."""
    for more in ({}, {"wgrad": "high_precision"}, {"gradient_format": "e5m2", "output_dtype": "float32"}):
        w, x = weight(dtype, G, N, K), torch.randn(17, K).to(dtype).requires_grad_()
        dy = torch.randn(17, N)
        results = []
        for recipe, of in ((MXFP4Weights(**more), w), (BlockScaling(**more), rounded(w))):  # type: ignore[arg-type]
            x.grad = None
            y = grouped_linear(x, of, SIZES, recipe=recipe, backend=REFERENCE)
            y.backward(dy.to(y.dtype))
            assert x.grad is not None
            assert of.grad is not None
            results.append((y, x.grad.clone(), of.grad))
        assert_equal(*results)


def test_a_slot_in_high_precision_reads_the_master(rng: np.random.Generator) -> None:
    """As in every recipe: dgrad then multiplies the weight as it was before rounding."""
    recipe = MXFP4Weights(dgrad="high_precision", wgrad="high_precision")
    w, x = weight(torch.float32, G, N, K), torch.randn(14, K, requires_grad=True)
    y = grouped_linear(x, w, SIZES, recipe=recipe, backend=REFERENCE)
    y.backward(torch.ones_like(y))
    (plain,) = torch.autograd.grad(grouped_linear(x, w, SIZES, recipe=None, backend=REFERENCE).sum(), x)
    assert torch.equal(x.grad, plain)  # type: ignore[arg-type]


def test_every_form_of_experts_reads_the_rounded_weights(rng: np.random.Generator) -> None:
    """grouped_mlp with interleaved gates, and moe_mlp with each way to keep a weight's codes, are those of blocks."""
    given, choices = draw(rng)
    exact = {name: rounded(value) if name in ("w1", "w2") else value for name, value in given.items()}
    calls: list[dict[str, Any]] = [{}, {"form": "lean"}, {"weight_codes": "remake"}, {"interleave": 8}]
    for call in calls:
        results = []
        for recipe, leaves in ((MXFP4Weights(), given), (BlockScaling(), exact)):
            y = moe_mlp(choices=choices, recipe=recipe, backend=REFERENCE, **leaves, **call)
            results.append((y, *torch.autograd.grad(y.float().square().sum(), list(leaves.values()))))
        assert_equal(*results)
    x, sizes = torch.randn(9, 64).bfloat16(), [2, 3, 0, 4, 0]
    ours, blocks = (
        grouped_mlp(x, one["w1"], one["w2"], sizes, recipe=recipe, backend=REFERENCE)
        for recipe, one in ((MXFP4Weights(), given), (BlockScaling(), exact))
    )
    assert torch.equal(ours, blocks)


def test_codes_are_made_once_and_written_again(rng: np.random.Generator) -> None:
    """quantize_weight and its out=, CodedWeight.copy_, quantized_parameters and masters hold the definition's codes."""
    w = weight(torch.bfloat16, G, N, K)
    for direction in ("rowwise", "columnwise"):
        spec = QuantizerSpec(**{**dict(SPEC), "mxfp4": direction})
        wanted = valid(quantize(BRIDGE.to_numpy(w), spec))
        q = octavo_torch.quantize(w.detach(), spec, backend=REFERENCE)
        assert q.spec.quantizer == spec
        assert all(BRIDGE.to_numpy(getattr(q, name)).tobytes() == value.tobytes() for name, value in wanted.items())
    handle = quantize_weight(w, "mxfp4", backend=REFERENCE)
    before = planes(handle)
    with torch.no_grad():
        w.mul_(-3)
    again = quantize_weight(w, "mxfp4", backend=REFERENCE, out=handle)
    fresh = quantize_weight(w, "mxfp4", backend=REFERENCE)
    assert [plane.data_ptr() for plane in planes(again)] == [plane.data_ptr() for plane in before]
    assert_equal(planes(again), planes(fresh))
    with quantized_parameters("mxfp4"):
        layer = GroupedLinear(G, K, N, dtype=torch.bfloat16, backend=REFERENCE)
    assert isinstance(layer.weight, CodedWeight)
    with torch.no_grad():  # type: ignore[unreachable]
        layer.weight.copy_(w)
    assert_equal(planes(layer.weight), planes(fresh))
    masters = MasterWeights(layer, values={"weight": w.detach().float()})
    optimizer = torch.optim.SGD(masters.all_parameters(), lr=0.5)
    masters.follow(optimizer)
    layer(torch.randn(14, K).bfloat16(), SIZES).float().square().sum().backward()
    optimizer.step()
    stepped = next(iter(masters.values())).detach().bfloat16()
    assert not torch.equal(stepped, w)
    assert_equal(planes(layer.weight), planes(quantize_weight(stepped.requires_grad_(), "mxfp4", backend=REFERENCE)))


def test_a_checkpoint_of_codes_is_taken_up_again(rng: np.random.Generator, tmp_path: Any) -> None:
    """Codes, their quantizer and new values written over them are as before; files say how the codes were made."""
    with quantized_parameters("mxfp4"):
        first, second = (GroupedMLP(G, 64, 96, dtype=torch.bfloat16, backend=REFERENCE) for _ in range(2))
    torch.save(first.state_dict(), tmp_path / "codes.pt")
    second.load_state_dict(torch.load(tmp_path / "codes.pt", weights_only=True))
    x = torch.randn(14, 64).bfloat16()
    assert torch.equal(first(x, SIZES), second(x, SIZES))
    values = torch.randn(first.weight1.shape)
    for module in (first, second):
        assert isinstance(module.weight1, CodedWeight)
        assert module.weight1.codes.spec.quantizer.mxfp4 == "rowwise"  # type: ignore[unreachable]
        with torch.no_grad():
            module.weight1.copy_(values)
    assert_equal(planes(first.weight1), planes(second.weight1))


def test_main_grad_takes_the_masters_gradient(rng: np.random.Generator) -> None:
    """wgrad adds to the weight's own buffer: rounding makes no other leaf."""
    w, x = weight(torch.float32, G, N, K), torch.randn(14, K)
    w.main_grad = torch.ones(G, N, K)  # type: ignore[attr-defined]
    y = grouped_linear(x, w, SIZES, recipe="mxfp4", backend=REFERENCE, main_grad="accumulate")
    y.backward(torch.ones_like(y))
    plain = w.detach().clone().requires_grad_()
    other = grouped_linear(x, plain, SIZES, recipe="mxfp4", backend=REFERENCE)
    (grad,) = torch.autograd.grad(other, plain, torch.ones_like(other))
    assert torch.equal(w.main_grad, 1 + grad)  # type: ignore[attr-defined]


def test_a_compiled_layer_has_the_same_bits(rng: np.random.Generator) -> None:
    """Rounding is one operator of the graph, which no compiler rewrites."""
    layer = GroupedLinear(G, K, N, recipe="mxfp4", dtype=torch.bfloat16, backend=REFERENCE)
    x = torch.randn(14, K).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for run in (layer, compiled):
        layer.weight.grad = None
        y = run(x, SIZES)
        y.float().square().sum().backward()
        results.append((y.detach(), layer.weight.grad))
    assert_equal(*results)  # type: ignore[arg-type]


def test_what_is_not_held_is_counted_by_expert(rng: np.random.Generator) -> None:
    """tensor_stats and observe count the values that E4M3 does not hold, and say nothing where all are held."""
    model = nn.Sequential(GroupedLinear(G, K, N, recipe="mxfp4", backend=REFERENCE))
    x = torch.randn(14, K)

    def seen() -> dict[str, float]:
        with observe(model, rows=None) as observer:
            model[0](x, SIZES)
            observation = observer.step()
        assert observation is not None
        return observation.as_dict("", experts=True)

    assert not [name for name in seen() if "inexact" in name]
    with torch.no_grad():
        model[0].weight[1, 5, :32] *= 2.0**-20
    wanted = tensor_stats(BRIDGE.to_numpy(model[0].weight), SPEC).inexact
    assert wanted[1] > 0
    assert octavo_torch.tensor_stats(model[0].weight.detach(), SPEC).inexact.tolist() == wanted.tolist()
    counted = {name: value for name, value in seen().items() if "inexact" in name}
    assert counted == {"0/w/inexact": wanted[1], "0/w/expert1/inexact": wanted[1]}


def test_the_plan_says_who_rounds(rng: np.random.Generator) -> None:
    """A printed plan names the recipe, what computes it, and what comes before the weight's codes."""
    layer = GroupedLinear(G, K, N, recipe="mxfp4", backend=REFERENCE)
    printed = str(layer.explain(torch.randn(14, K), SIZES))
    assert (
        f"grouped linear in mxfp4_weights ({layer.recipe.fingerprint}), computed as block for torch on cpu" in printed
    )
    assert "of MXFP4's values, rounded by operations of torch" in printed
    assert printed.count("rounded") == 1
