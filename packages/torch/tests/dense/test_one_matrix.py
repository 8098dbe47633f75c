"""Linear: torch.nn.Linear's place, parameters and state dicts, and the bits of a grouped product of one group."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import octavo_numerics
from octavo import MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling, HighPrecision, Recipe
from octavo_torch import (
    GroupedLinear,
    GroupedLoRA,
    Linear,
    Sequential,
    add_lora,
    convert,
    explain_gather,
    grouped_linear,
    load_checkpoint,
    merge_lora,
    observe,
    quantize_before_gather,
    quantized_parameters,
    recipe_state,
    save_checkpoint,
    update_scales,
)
from octavo_torch.arrays.zero_gradient import ZeroGradient

K, N = 64, 48
SHAPE = (3, 7)  # leading axes
ROWS = 21
BACKEND = "torch-reference"
RECIPES: dict[str, Recipe] = {
    recipe.kind: recipe
    for recipe in (HighPrecision(), DelayedScaling(history=4), CurrentScaling(), BlockScaling(), MXFP8(), NVFP4())
}


def make(recipe: Recipe | None = None, **options: Any) -> Linear:
    options = {"dtype": torch.bfloat16, "seed": 3, "backend": BACKEND, **options}
    return Linear(K, N, recipe=BlockScaling() if recipe is None else recipe, **options)


def grouped(layer: Linear, **options: Any) -> GroupedLinear:
    """One group with the same values, seed and recipe."""
    twin = GroupedLinear(
        1, K, N, bias=layer.bias is not None, recipe=layer.recipe, dtype=layer.weight.dtype, seed=3, backend=BACKEND,
        **options,
    )  # fmt: skip
    with torch.no_grad():
        twin.weight.copy_(layer.weight[None])
        if layer.bias is not None and twin.bias is not None:
            twin.bias.copy_(layer.bias[None])
    return twin


def rows(*shape: int, columns: int = K) -> Tensor:
    return torch.randn(*(shape or SHAPE), columns, dtype=torch.bfloat16)


def step(layer: Any, x: Tensor, dy: Tensor, *sizes: object, **options: Any) -> list[Tensor]:
    """y, gradients and buffers of a step, parameters' gradients in the shapes of a Linear's."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf, *sizes, **options)
    y.backward(dy)
    update_scales(layer)
    assert leaf.grad is not None
    own = [layer.weight, *([] if layer.bias is None else [layer.bias])]
    grads = [value.grad.reshape(value.grad.shape[-2:] if value is layer.weight else -1).clone() for value in own]
    return [y.detach(), leaf.grad, *grads, *(value.clone() for value in layer.buffers())]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert [value.shape for value in left] == [value.shape for value in right]
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- what it computes


@pytest.mark.parametrize("kind", RECIPES)
def test_bits_are_those_of_one_group(kind: str, rng: np.random.Generator) -> None:
    """y, all gradients, scales and seeds of two steps, in every kind of recipe, for x with leading axes."""
    layer = make(RECIPES[kind])
    twin = grouped(layer)
    for _ in range(2):
        x, dy = rows(), rows(columns=N)
        assert_same(step(layer, x, dy), step(twin, x, dy, [ROWS]))
    assert layer.weight.shape == (N, K)
    assert layer.weight.grad is not None
    assert layer.weight.grad.shape == (N, K)


def test_values_are_those_of_torch_within_the_bounds(rng: np.random.Generator) -> None:
    """Without quantization y is torch.nn.Linear's, up to the rounding of sums."""
    layer = Linear(K, N, False, recipe=None, backend=BACKEND)
    x = torch.randn(ROWS, K)
    bound = octavo_numerics.error_bound(HighPrecision(), K, out_dtype="float32")
    report = bound.check(layer(x).detach().numpy(), x.numpy(), layer.weight.detach().numpy())
    assert report.passed, report.describe()


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()], ids=["no rows", "an empty axis", "one row without an axis"])
def test_any_leading_axes(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """Results have them, and no row at all gives gradients of zeros."""
    layer = make()
    x = torch.randn(*shape, K, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    assert y.shape == (*shape, N)
    y.sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert x.grad.shape == x.shape
    assert bool(layer.weight.grad.any()) == (shape == ())


def test_only_the_gradients_that_are_asked_for(rng: np.random.Generator) -> None:
    """A frozen layer passes x's gradient on, and one in front of which nothing learns has the weight's alone."""
    frozen, first = make().requires_grad_(False), make()
    x = rows().requires_grad_()
    frozen(x).sum().backward()
    assert x.grad is not None
    assert frozen.weight.grad is None
    first(x.detach()).sum().backward()
    assert first.weight.grad is not None


def test_autocast_is_that_of_a_grouped_layer(rng: np.random.Generator) -> None:
    """fp32 parameters are cast before they are quantized, codes made inside serve inside, gradients are fp32."""
    layer = make(dtype=torch.float32)
    twin = grouped(layer)
    x, dy = torch.randn(*SHAPE, K), rows(columns=N)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = step(layer, x, dy), step(twin, x, dy, [ROWS])
        codes = layer.quantize_weight()
        assert torch.equal(layer(x, weight=codes), ours[0])
    assert_same(ours, theirs)
    assert ours[0].dtype is torch.bfloat16
    assert ours[2].dtype is torch.float32
    with pytest.raises(ValueError, match=r"was quantized inside of torch\.autocast"):
        layer(x.bfloat16().float(), weight=codes)


def test_a_compiled_layer_has_the_same_bits(rng: np.random.Generator) -> None:
    """One graph without a break, forward and backward, in which the weight is not copied into a stack of one."""
    layer = make()
    x, dy = rows(), rows(columns=N)
    called: list[str] = []

    def read(graph: torch.fx.GraphModule, _: object) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    expected = step(layer, x, dy)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=read), fullgraph=True)
    layer.zero_grad()
    y = compiled(x)
    y.backward(dy)
    assert layer.weight.grad is not None
    assert torch.equal(y, expected[0])
    assert torch.equal(layer.weight.grad, expected[2])
    assert any("unsqueeze" in name for name in called)
    assert not any("stack" in name or "cat" in name for name in called)


# ---- options


@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
def test_main_grad_is_the_weights_own(mode: Any, rng: np.random.Generator) -> None:
    """fp32 [N, K], added to or overwritten; autograd gets zeros that take no memory."""
    layer, plain = make(main_grad=mode), make()
    plain.load_state_dict(layer.state_dict())
    before = torch.randn(N, K)
    layer.weight.main_grad = before.clone()  # type: ignore[attr-defined]
    x, dy = rows(), rows(columns=N)
    layer(x).backward(dy)
    plain(x).backward(dy)
    assert plain.weight.grad is not None
    added = layer.weight.main_grad - (before if mode == "accumulate" else 0)  # type: ignore[attr-defined]
    # the sum in fp32 is rounded once to bf16 for `.grad`, and once when it is added to what was there
    unit = 2.0**-8 * plain.weight.grad.abs() + 2.0**-23 * (before.abs() + added.abs())
    assert bool(((added - plain.weight.grad).abs() <= unit).all())
    assert layer.weight.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert isinstance(layer.weight.grad, ZeroGradient)
    assert layer.weight.grad.shape == (N, K)
    assert not layer.weight.grad.is_written


def test_weight_gradients_that_come_later(rng: np.random.Generator) -> None:
    """delay_wgrad leaves the weight's to backward_dw, microbatch by microbatch, with the bits of a backward."""
    layer, plain = make(delay_wgrad=True), make()
    plain.load_state_dict(layer.state_dict())
    for _ in range(2):
        x, dy = rows(), rows(columns=N)
        layer(x).backward(dy)
        plain(x).backward(dy)
    assert layer.weight.grad is None
    layer.backward_dw(count=1)
    layer.backward_dw()
    assert layer.weight.grad is not None
    assert plain.weight.grad is not None
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_operands_quantized_once(rng: np.random.Generator) -> None:
    """A weight for all microbatches, an x for q, k and v: the bits of calls that quantize. Another's is refused."""
    layer, other = make(), make()
    x, dy = rows(ROWS), rows(ROWS, columns=N)
    expected = step(layer, x, dy)
    weight = layer.quantize_weight()
    assert_same(step(layer, x, dy, weight=weight), expected)
    leaf = x.clone().requires_grad_()
    codes = layer.quantize_input(leaf)
    assert torch.equal(layer(codes), expected[0])
    assert torch.equal(other(codes), other(x))
    assert layer.quantize_weight(out=weight) is weight
    with pytest.raises(ValueError, match="weight was not made by this module"):
        other(x, weight=weight)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(ValueError, match="has changed in place"):
        layer(x, weight=weight)


def test_the_callers_buffers(rng: np.random.Generator) -> None:
    """out= and grad_input= receive y and dx with x's leading axes, from a Sequential's ends, too."""
    layer, last = make(), Linear(N, K, recipe=MXFP8(), dtype=torch.bfloat16, backend=BACKEND)
    x, dy = rows(), rows(columns=N)
    expected = step(layer, x, dy)
    out, grad_input = torch.empty(*SHAPE, N, dtype=torch.bfloat16), torch.empty(*SHAPE, K, dtype=torch.bfloat16)
    leaf = x.clone().requires_grad_()
    layer(leaf, out=out, grad_input=grad_input).backward(dy)
    assert torch.equal(out, expected[0])
    assert torch.equal(grad_input, expected[1])
    model, end = Sequential(layer, nn.SiLU(), last), torch.empty(*SHAPE, K, dtype=torch.bfloat16)
    weights = model.quantize_weights()
    assert set(weights) == {0, 2}
    with torch.no_grad():
        y = model(x, None, weights=weights, out=end)
        assert torch.equal(y, last(nn.functional.silu(layer(x))))
    assert torch.equal(end, y)


def test_a_plan_says_who_multiplies(rng: np.random.Generator) -> None:
    """explain takes x alone, with any leading axes, and computes nothing."""
    plan = str(make().explain(rows().requires_grad_()))
    lines = [line.split() for line in plan.splitlines()]
    assert {"fprop", "dgrad", "wgrad"} <= {line[0] for line in lines if BACKEND in line}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: make(main_grad="add"), "main_grad is 'add'; give 'accumulate', 'overwrite' or None"),
        (lambda: Linear(0, N, recipe=None), "in_features is 0; give an integer of at least 1"),
        (lambda: Linear(K, N, 1, recipe=None), "bias is 1; give True or False"),  # type: ignore[arg-type]
        (lambda: make()(torch.randn(3, K + 16, dtype=torch.bfloat16)), f"x has {K + 16} features and weight"),
        (lambda: make()(torch.randn(3, K)), "x has dtype float32 and weight bfloat16; cast one"),
        (lambda: make()("x"), r"x is a str; give a tensor \[M, K\]"),
    ],
)
def test_arguments_that_do_not_fit(call: Any, sentence: str) -> None:
    """Refused in sentences."""
    with pytest.raises(ValueError, match=sentence):
        call()


# ---- the place of torch.nn.Linear


def test_it_stands_where_torchs_linear_stood(rng: np.random.Generator) -> None:
    """The same positional arguments and defaults, an instance of it, state dicts both ways, values as uniform."""
    theirs, ours = (list(inspect.signature(kind).parameters.values())[:5] for kind in (nn.Linear, Linear))
    assert [(each.name, each.default) for each in theirs] == [(each.name, each.default) for each in ours]
    for bias in (True, False):
        torchs, layer = nn.Linear(K, N, bias), Linear(K, N, bias, recipe=HighPrecision(), backend=BACKEND)
        assert isinstance(layer, nn.Linear)
        assert list(layer.state_dict()) == list(torchs.state_dict())
        layer.load_state_dict(torchs.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), torchs.parameters(), strict=True))
        layer.reset_parameters()
        torchs.load_state_dict(layer.state_dict())
        assert torch.equal(torchs.weight, layer.weight)
        # 3072 draws from +-K^-0.5: the largest is above 0.98 of the bound but for one run in 10^26
        assert 0.98 * K**-0.5 < float(layer.weight.detach().abs().max()) <= K**-0.5
    one = GroupedLinear(1, K, N, bias=True, recipe=None)
    make(HighPrecision()).load_state_dict(one.state_dict())


def test_copies_and_a_deferred_start(rng: np.random.Generator) -> None:
    """deepcopy and pickle after a forward train alike; a meta device's layer begins at reset_parameters."""
    layer = make(NVFP4())
    x, dy = rows(), rows(columns=N)
    layer(x)
    twins = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    expected = step(layer, x, dy)
    for twin in twins:
        assert_same(step(twin, x, dy), expected)
    empty = make(NVFP4(), device="meta")
    empty.to_empty(device="cpu")
    empty.reset_parameters()
    assert empty.seed_base.item() == 3
    assert empty.weight.abs().max() <= K**-0.5


def test_a_parametrized_weight_is_computed_in_each_forward(rng: np.random.Generator) -> None:
    """As in a grouped layer: its values are quantized, and the gradient reaches the original."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    layer, x = make(), rows()
    weight, bias = layer.weight.detach().clone(), layer.biases
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    y = layer(x)
    expected = grouped_linear(x, 2 * weight[None], [ROWS], recipe=layer.recipe, bias=bias, backend=BACKEND)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert any(parameter.grad is not None for name, parameter in layer.named_parameters() if "original" in name)


# ---- what the rest of the package does with it


def test_a_recipe_can_be_changed_and_is_part_of_a_checkpoint(tmp_path: Path, rng: np.random.Generator) -> None:
    """`convert` brings and takes a recipe's buffers; files hold values, under torch's names, with the recipe."""
    layer = make()
    model = nn.Sequential(layer)
    assert convert(model, DelayedScaling(history=4), backend=BACKEND) == ("0",)
    assert layer.amax_history.shape == (3, 4, 1)
    assert convert(model, NVFP4(), "0", seed=5, backend=BACKEND) == ("0",)
    assert set(layer.state_dict()) == {"weight", "bias", "seed_base", "seed_counter"}
    assert list(recipe_state(model)) == ["0.recipe_fingerprint"]
    path = tmp_path / "model.safetensors"
    pytest.importorskip("safetensors")
    save_checkpoint(model, path, quantized=True)
    loaded = nn.Sequential(make(NVFP4(), seed=9))
    load_checkpoint(loaded, path)
    assert_same(list(loaded.state_dict().values()), list(model.state_dict().values()))


def test_weights_stay_values(rng: np.random.Generator) -> None:
    """Inside of quantized_parameters a Linear has the recipe and torch's weight; FSDP2 gathers values, and says so."""
    with quantized_parameters("fp8-block"):
        model = nn.ModuleDict({"q": Linear(K, N), "experts": GroupedLinear(2, K, N)})
    layer = model["q"]
    assert isinstance(layer, Linear)
    assert layer.recipe == BlockScaling()
    assert type(layer.weight) is nn.Parameter
    assert explain_gather(layer) == "weight: gathered unquantized: it is one matrix"
    with pytest.raises(ValueError, match="without a GroupedLinear"):
        quantize_before_gather(layer)


def test_adapters_and_observers_know_it(rng: np.random.Generator) -> None:
    """add_lora adds to the product of a frozen weight, merge_lora to the weight, and observe counts its operands."""
    layer, x = make(HighPrecision(), dtype=torch.float32), torch.randn(ROWS, K)
    model, values = nn.Sequential(layer), layer.weight.detach().clone()
    plain = layer(x)
    assert add_lora(model, 4) == ("0.lora",)
    adapter = layer.lora
    assert isinstance(adapter, GroupedLoRA)
    assert {id(value) for value in model.parameters() if value.requires_grad} == set(map(id, adapter.parameters()))
    with torch.no_grad():
        for value in adapter.parameters():
            value.copy_(torch.randn_like(value))
        merged = adapter.merged_weight(values[None])
        assert torch.equal(model(x), plain + adapter.delta(x, [ROWS]))
        assert not torch.equal(model(x), plain)
    assert merge_lora(model) == ("0.lora",)
    assert torch.equal(layer.weight, merged[0])
    with observe(nn.ModuleDict({"q": make()}), every=1, rows=None) as observer:
        next(iter(observer._layers.values()))(rows())
        seen = observer.step()
    assert seen is not None
    assert seen.as_dict()["octavo/q/x/amax"] > 0


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_a_bias_that_is_set_later(kind: str, rng: np.random.Generator) -> None:
    """It is added and has a gradient, as torch's is, and one that is taken away is not: torch's fusion of a batch norm
    sets one, and the layer went on without it."""
    recipe = HighPrecision()
    shape, sizes = ((N,), ()) if kind == "Linear" else ((1, N), ([5],))
    made = (lambda **o: make(recipe, **o)) if kind == "Linear" else lambda **o: grouped(make(recipe, **o))
    layer, wanted = made(bias=False), made(bias=True)
    wanted.load_state_dict({"weight": layer.weight.detach(), "bias": torch.randn(shape)})
    layer.bias = nn.Parameter(wanted.bias.detach().clone())
    x = torch.randn(5, K).bfloat16()
    for module in (layer, wanted):
        module(x, *sizes).float().square().sum().backward()
    assert torch.equal(layer(x, *sizes), wanted(x, *sizes))
    assert torch.equal(layer.bias.grad, wanted.bias.grad)
    assert "bias=True" in repr(layer)
    wanted.bias = None
    plain = made(bias=False)
    plain.load_state_dict(wanted.state_dict())
    assert torch.equal(wanted(x, *sizes), plain(x, *sizes))
    assert "bias=False" in repr(wanted)


def test_a_batch_norm_is_fused_into_it(rng: np.random.Generator) -> None:
    """`torch.nn.utils.fusion.fuse_linear_bn_eval`, which knows a torch.nn.Linear by its attributes."""
    layer = make(HighPrecision(), bias=False, dtype=torch.float32).eval()
    norm = nn.BatchNorm1d(N).eval()
    for value in (norm.bias.data, norm.weight.data, norm.running_mean):
        value.copy_(torch.randn(N))
    fused = torch.nn.utils.fusion.fuse_linear_bn_eval(layer, norm)
    x = torch.randn(7, K)
    y, wanted = fused(x), norm(layer(x))
    assert isinstance(fused, Linear)
    bound = (x.abs() @ fused.weight.abs().T + fused.bias.abs()) * (K + 4) * 2.0**-23
    assert bool(((y - wanted).abs() <= bound + (wanted - norm.bias).abs() * 2.0**-20).all())


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_a_parametrized_layer_that_has_run_is_copied(kind: str, rng: np.random.Generator) -> None:
    """torch's parametrizations copy a module's attributes one by one, the layers that it has resolved among them."""
    layer = make(MXFP8()) if kind == "Linear" else grouped(make(MXFP8()))
    sizes = () if kind == "Linear" else ([5],)
    torch.nn.utils.parametrizations.weight_norm(layer)
    x = torch.randn(5, K).bfloat16()
    y = layer(x, *sizes)
    assert torch.equal(copy.deepcopy(layer)(x, *sizes), y)
