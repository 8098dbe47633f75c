"""GroupedLoRA, add_lora and merge_lora: what adapters add, over weights that are values or codes alone."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from low_rank_oracle import Near, assert_near, exact, oracle, product, rounded, scaled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octavo import PRESETS, BlockScaling, DelayedScaling, Recipe
from octavo_torch import (
    CodedWeight,
    GroupedLinear,
    GroupedLoRA,
    GroupedMLP,
    MoE,
    Sequential,
    activate,
    add_lora,
    dequantize,
    grouped_linear,
    merge_lora,
    permute,
    quantize_input,
    quantized_parameters,
    unpermute,
)
from octavo_torch.arrays.interleaving import from_halves
from octavo_torch.compiler.host_reads import watch_host_reads
from octavo_torch.mlp.activation_module import Activation

REFERENCE = "torch-reference"
G, K, F, M = 3, 64, 48, 20
SIZES = [5, 0, 12]
USED = sum(SIZES)
RECIPES: dict[str, Recipe] = {
    **PRESETS,
    "fp8-delayed": DelayedScaling(history=4),
    "fp32 results": BlockScaling(output_dtype="float32"),
}
CODES = ("mxfp8", "fp8-block", "fp8-row", "fp8-current", "nvfp4")
MODULES: dict[str, Any] = {
    "GroupedLinear": lambda **more: GroupedLinear(G, K, F, bias=True, backend=REFERENCE, **more),
    "GroupedMLP": lambda **more: GroupedMLP(G, K, F, **{"interleave": 16, "bias": True, "backend": REFERENCE, **more}),
    "MoE": lambda **more: MoE(G, K, F, 2, bias=True, backend=REFERENCE, **more),
}


def made(name: str, **more: Any) -> Any:
    return MODULES[name](**{"dtype": torch.bfloat16, "seed": 3, **more})


def randomize(module: nn.Module) -> list[nn.Parameter]:
    """Values other than zero for every B; the adapters' parameters."""
    own = [parameter for name, parameter in module.named_parameters() if "lora_" in name]
    for parameter in own:
        nn.init.normal_(parameter, std=0.2)
    return own


def rows(poison: bool = True) -> Tensor:
    x = torch.randn(M, K).bfloat16()
    if poison:
        x[USED:] = torch.nan
    return x.requires_grad_()


def called(module: nn.Module, x: Tensor, **more: Any) -> Tensor:
    y: Tensor = module(x, **more) if isinstance(module, MoE) else module(x, SIZES, **more)
    return y


def passed(module: nn.Module, x: Tensor, dy: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    y = called(module, x)
    return [y, *torch.autograd.grad(y, inputs, dy[:, : y.shape[1]].to(y.dtype))]


@pytest.mark.parametrize("rank", [5, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients_are_those_of_float64(rank: int, dtype: torch.dtype, rng: np.random.Generator) -> None:
    """delta and the gradients of x, A and B within the bounds of their GEMMs, whatever the rank is padded to; rows past
    the sum, of NaN, and a group without rows change nothing."""
    alpha = float(rng.choice([rank, 3.7, 64.0]))
    lora = GroupedLoRA(G, K, F, rank, alpha=alpha, rank_stabilized=bool(rng.random() < 0.5), dtype=dtype)
    assert not lora.lora_B.any()
    a, b = randomize(lora)
    x, dy = torch.randn(M, K).to(dtype), torch.randn(M, F).to(dtype)
    x[USED:], dy[USED:] = torch.nan, torch.nan
    leaf = x.clone().requires_grad_()
    y = lora(leaf, SIZES)
    dx, da, db = torch.autograd.grad(y, [leaf, a, b], dy)
    wanted = oracle(x[:USED], SIZES, a.detach(), b.detach(), lora.scale, dy[:USED])
    for actual, near in ((y[:USED], wanted.delta), (dx[:USED], wanted.x), (da, wanted.a), (db, wanted.b)):
        assert_near(actual, near)
        assert bool(actual.any())
    assert not y[USED:].any()
    assert not dx[USED:].any()
    assert not da[1].any()
    assert not db[1].any()
    assert lora.scale == alpha / (rank**0.5 if lora.rank_stabilized else rank)


def test_wide_factors_and_narrow_rows(rng: np.random.Generator) -> None:
    """fp32 adapters beside bf16 rows: products are bf16's, gradients have the parameters' dtype."""
    wide = GroupedLoRA(G, K, F, 8)
    randomize(wide)
    narrow = copy.deepcopy(wide).bfloat16()
    x = rows(poison=False)
    assert torch.equal(wide(x, SIZES), narrow(x, SIZES))
    wide(x, SIZES).float().square().sum().backward()
    narrow(x, SIZES).float().square().sum().backward()
    for ours, theirs in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype is torch.float32
        assert torch.equal(ours.grad, theirs.grad.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(wide(x.detach().float(), SIZES), narrow(x, SIZES))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_a_new_adapter_changes_no_bit(name: str, recipe: str, rng: np.random.Generator) -> None:
    """y, and where gradients are rounded to nearest x's gradient, are those of the module without adapters: the layers
    are the recipe's, one after the other."""
    module = made(name, recipe=RECIPES[recipe])
    x, dy = rows(name != "MoE"), torch.randn(M, K)
    before = passed(copy.deepcopy(module), x, dy, [x])
    names = add_lora(module, 8)
    assert names == {"GroupedLinear": ("lora",)}.get(name, ("lora1", "lora2"))
    after = passed(module, x, dy, [x])
    assert torch.equal(after[0], before[0])
    assert after[0].dtype is before[0].dtype
    if not RECIPES[recipe].stochastic:
        assert torch.equal(after[1], before[1])
    own = {key for key, value in module.named_parameters() if value.requires_grad}
    assert {key for key in own if key != "router"} == {f"{place}.lora_{part}" for place in names for part in "AB"}


def parts_in_a_row(module: Any, x: Tensor) -> Tensor:
    """The module's result of public functions: rows, products, adapters, activation."""
    how: dict[str, Any] = {"recipe": module.recipe, "backend": REFERENCE, "seed": 0}
    if isinstance(module, GroupedLinear):
        return grouped_linear(x, module.weight, SIZES, bias=module.bias, **how) + module.lora(x, SIZES)
    probs, routing, sizes, tokens = None, None, torch.tensor(SIZES), x
    if isinstance(module, MoE):
        choice = module.choose(x)
        tokens, sizes, routing = permute(x, choice.choices, G, backend=REFERENCE)
        probs = routing.to_rows(choice.weights, backend=REFERENCE)
    h = grouped_linear(tokens, module.weight1, sizes, bias=module.bias1, **how) + module.lora1(tokens, sizes)
    a = activate(h, "swiglu", probs=probs)
    y = grouped_linear(a, module.weight2, sizes, bias=module.bias2, bias_scales=probs, **how) + module.lora2(a, sizes)
    return y if routing is None else unpermute(y, routing, backend=REFERENCE)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("recipe", CODES)
def test_frozen_codes_train_what_is_around_them(name: str, recipe: str, rng: np.random.Generator) -> None:
    """Codes alone give the bits of values, and both those of the operations in a row: y, and the gradients of x and of
    every adapter, none of them zero; the weights get none, and codes stay the only copy of them."""
    plain = {"interleave": None} if name == "GroupedMLP" else {}
    seed = int(rng.integers(1 << 31))
    torch.manual_seed(seed)
    with quantized_parameters(recipe):
        module = made(name, **plain)
    torch.manual_seed(seed)
    valued = made(name, recipe=recipe, **plain)
    for one in (module, valued):
        add_lora(one, 8, alpha=16)
    own = randomize(module)
    for ours, theirs in zip((p for n, p in valued.named_parameters() if "lora_" in n), own, strict=True):
        ours.data.copy_(theirs)
    x, dy = rows(name != "MoE"), torch.randn(M, K)
    results = []
    for one, function in ((module, called), (valued, called), (module, parts_in_a_row)):
        y = function(one, x)
        inputs = [x, *(p for n, p in one.named_parameters() if "lora_" in n)]
        results.append([y, *torch.autograd.grad(y, inputs, dy[:, : y.shape[1]].bfloat16())])
    stochastic = PRESETS[recipe].stochastic  # counters of modules and a seed do not round alike
    for ours, theirs, third in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
        assert stochastic or torch.equal(ours, third)
    assert all(bool(grad.any()) for grad in results[0][1:])
    weights = [p for n, p in module.named_parameters() if n.startswith("weight")]
    assert weights
    assert all(isinstance(weight, CodedWeight) and weight.grad is None for weight in weights)


def bytes_of(saved: list[Tensor]) -> int:
    return sum({value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in saved}.values())


@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8"])
def test_what_is_kept_of_frozen_codes(recipe: str, rng: np.random.Generator) -> None:
    """For the backward: no copy of a weight in any precision, x once, h, a, and two narrow products; codes are a byte
    an element of each plane."""
    groups, columns, hidden, m = 4, 256, 128, 64
    with quantized_parameters(recipe):
        module = GroupedMLP(groups, columns, hidden, dtype=torch.bfloat16, backend=REFERENCE)
    held = sum(p.codes.nbytes() for p in module.parameters())  # type: ignore[attr-defined]
    values = sum(p.numel() for p in module.parameters())
    planes = 1 if recipe == "fp8-block" else 2
    assert values * planes <= held <= values * planes * 1.04
    add_lora(module, 16)
    randomize(module)
    own = {p.untyped_storage().data_ptr() for p in module.parameters() if not isinstance(p, CodedWeight)}
    for weight in (module.weight1, module.weight2):
        own |= {getattr(weight, name).untyped_storage().data_ptr() for name in weight.__tensor_flatten__()[0]}  # type: ignore[attr-defined]
    saved: list[Tensor] = []
    x = torch.randn(m, columns).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda value: saved.append(value) or value, lambda value: value):  # type: ignore[func-returns-value]
        y = module(x, [10, 0, 40, 14])
    fresh = [value for value in saved if value.untyped_storage().data_ptr() not in own]
    narrow = 2 * 16
    assert bytes_of(fresh) <= 2 * m * (columns + 2 * hidden + hidden + narrow) + 1024
    assert bytes_of([x]) == 2 * m * columns
    y.sum().backward()


def test_nothing_is_computed_for_weights(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen layer asks its backend for no wgrad, nor for the codes that one would read."""
    from octavo_torch.dispatch.layer import Layer

    asked: list[tuple[bool, bool]] = []
    resolve = Layer.__init__

    def record(self: Layer, *given: Any) -> None:
        resolve(self, *given)
        if self.recipe.kind == "block":
            asked.append((self.wgrad is not None, "columnwise" in self.quantizers["x"].request.quantizer.directions))

    monkeypatch.setattr(Layer, "__init__", record)
    recipe = BlockScaling(amax_epsilon=float(rng.random()))  # a recipe that no test has resolved
    with quantized_parameters(recipe):
        module = GroupedMLP(G, K, F, dtype=torch.bfloat16, backend=REFERENCE)
    add_lora(module, 8)
    asked.clear()
    module(rows(), SIZES).sum().backward()
    assert asked == [(False, False), (False, False)]


def assert_merged(actual: Tensor, values: Tensor, lora: GroupedLoRA) -> None:
    """values + scale B A, summed in fp32 and rounded once to the values' dtype."""
    for group in range(G):
        factors = exact(lora.lora_B[group]), exact(lora.lora_A[group].T)
        delta = scaled(product(*factors, "fprop", torch.float32), lora.scale, torch.float32)
        total = Near(delta.value + exact(values[group]).value, delta.error)
        assert_near(actual[group], rounded(rounded(total, torch.float32), actual.dtype))


def values_of(module: Any, name: str) -> Tensor:
    """A weight [G, N, K] in its own order, dequantized where it is codes."""
    weight = module.of_all_groups(name)
    if isinstance(weight, CodedWeight):
        values = dequantize(weight.codes)
        return from_halves(values, weight.interleave) if weight.interleave else values
    return (weight if isinstance(weight, Tensor) else torch.stack(weight)).detach().clone()


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_merged_weights(name: str, per_group: bool, rng: np.random.Generator) -> None:
    """merge_lora adds B A in place, in the weight's own order, and removes the adapters; what was frozen stays so."""
    module = made(name, recipe=None, per_group_parameters=per_group)
    add_lora(module, 8, alpha=3.7)
    randomize(module)
    adapters = {key: one for key, one in module.named_modules() if isinstance(one, GroupedLoRA)}
    before = {key: values_of(module, key.replace("lora", "weight")) for key in adapters}
    places = [parameter.data_ptr() for key, parameter in module.named_parameters() if key.startswith("weight")]
    assert merge_lora(module) == tuple(adapters)
    assert not list(module.children())
    assert [p.data_ptr() for key, p in module.named_parameters() if key.startswith("weight")] == places
    for key, one in adapters.items():
        after = values_of(module, key.replace("lora", "weight"))
        assert_merged(after, before[key], one)
        assert not torch.equal(after, before[key])


@pytest.mark.parametrize("recipe", ["fp8-block", "nvfp4"])
@pytest.mark.parametrize("name", MODULES)
def test_codes_are_not_merged(name: str, recipe: str, rng: np.random.Generator) -> None:
    """The sum would be rounded to codes, so it is refused, and merged_weight makes values of it."""
    with quantized_parameters(recipe):
        module = made(name)
    places = add_lora(module, 8)
    randomize(module)
    with pytest.raises(ValueError, match=r"weight1? is codes alone, which would round the sum"):
        merge_lora(module)
    for place in places:
        adapter, weight = module.get_submodule(place), place.replace("lora", "weight")
        merged = adapter.merged_weight(module.get_parameter(weight))
        assert merged.dtype is torch.bfloat16
        assert_merged(merged, values_of(module, weight), adapter)


def test_some_groups_train(rng: np.random.Generator) -> None:
    """Others get zeros as gradients, and add to the result as before; None trains all again."""
    module = made("GroupedMLP", recipe="fp8-block")
    add_lora(module, 8)
    own = randomize(module)
    x = rows()
    y = called(module, x)
    full = torch.autograd.grad(y.sum(), own)
    for key in ("lora1", "lora2"):
        module.get_submodule(key).train_groups([2])
    assert torch.equal(called(module, x), y)
    for some, all_of in zip(torch.autograd.grad(called(module, x).sum(), own), full, strict=True):
        assert torch.equal(some[2], all_of[2])
        assert bool(all_of[0].any())
        assert not some[:2].any()
    module.lora1.train_groups(None)
    assert torch.equal(torch.autograd.grad(called(module, x).sum(), own)[0], full[0])
    module.lora2.lora_A.requires_grad_(False)
    called(module, x).sum().backward()
    assert module.lora2.lora_A.grad is None
    assert bool(module.lora2.lora_B.grad[2].any())


def test_dropout_is_the_adapters_alone(rng: np.random.Generator) -> None:
    """In training the adapter reads some of x, the base all; in evaluation nothing is dropped; recomputing drops the
    same elements."""
    module = made("GroupedLinear", recipe=None)
    add_lora(module, 8, dropout=0.5)
    randomize(module)
    x = rows(poison=False)
    base = grouped_linear(x, module.weight, SIZES, recipe=None, bias=module.bias, backend=REFERENCE)
    torch.manual_seed(7)
    y = called(module, x)
    torch.manual_seed(7)
    kept = nn.functional.dropout(x, 0.5)
    assert torch.equal(y, base + copy.deepcopy(module.lora).eval()(kept, SIZES))
    module.eval()
    assert torch.equal(called(module, x), base + module.lora(x, SIZES))
    module.train()
    torch.manual_seed(7)
    again = checkpoint(module, x, SIZES, use_reentrant=False)
    inputs = [x, *module.lora.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(again.sum(), inputs), torch.autograd.grad(y.sum(), inputs), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", MODULES)
def test_recomputed_compiled_and_stored(name: str, rng: np.random.Generator) -> None:
    """Activation checkpointing, MoE's own form "recompute", torch.compile in one graph, and a state dict that
    torch.save has written: each has the same bits."""
    with quantized_parameters("fp8-block"):
        module = made(name)
    add_lora(module, 8, alpha=16)
    own = randomize(module)
    x, dy = rows(name != "MoE"), torch.randn(M, K)
    wanted = passed(module, x, dy, [x, *own])
    sizes = () if name == "MoE" else (torch.tensor(SIZES),)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for function in (lambda: checkpoint(module, x, *sizes, use_reentrant=False), lambda: compiled(x, *sizes)):
        y = function()
        for ours, theirs in zip(
            [y, *torch.autograd.grad(y, [x, *own], dy[:, : y.shape[1]].bfloat16())], wanted, strict=True
        ):
            assert torch.equal(ours, theirs)
    if name == "MoE":
        module.form = "recompute"
        assert all(map(torch.equal, passed(module, x, dy, [x, *own]), wanted))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    with quantized_parameters("fp8-block"):
        twin = made(name)
    add_lora(twin, 8, alpha=16)
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(called(twin, x), wanted[0])


def test_no_value_is_read(rng: np.random.Generator) -> None:
    """With sizes in a tensor, forward and backward read no value of it but the check of host sizes: on a GPU, where
    there is none, nothing waits, and a CUDA graph may hold the step."""
    module = made("GroupedMLP", recipe="fp8-block")
    add_lora(module, 8, alpha=3)
    own = randomize(module)
    x, sizes = rows(), torch.tensor(SIZES)
    module.lora1.train_groups([0])
    with watch_host_reads() as reads:
        torch.autograd.grad(module(x, sizes).sum(), [x, *own])
    adapted = set(reads)
    reads.clear()
    with watch_host_reads() as reads:
        for recipe in ("fp8-block", None):
            y = grouped_linear(x, module.weight1, sizes, recipe=recipe, backend=REFERENCE)
            torch.autograd.grad(y.sum(), x)
    assert adapted
    assert adapted <= set(reads)


def test_layers_in_a_row_are_not_fused_past_their_adapters(rng: np.random.Generator) -> None:
    """Sequential runs three layers as one MLP, which would leave adapters out."""
    first = GroupedLinear(G, K, 2 * F, recipe="fp8-block", dtype=torch.bfloat16, backend=REFERENCE)
    row = Sequential(
        first, Activation(), GroupedLinear(G, F, K, recipe="fp8-block", dtype=torch.bfloat16, backend=REFERENCE)
    )
    x = rows()
    plain = row(x, SIZES)
    assert add_lora(row, 8) == ("0.lora", "2.lora")
    assert torch.equal(row(x, SIZES), plain)
    own = randomize(row)
    assert not torch.equal(row(x, SIZES), plain)
    assert all(bool(grad.any()) for grad in torch.autograd.grad(row(x, SIZES).sum(), own))


def test_leading_axes(rng: np.random.Generator) -> None:
    """x [..., K] is rows in order, for every layer."""
    for name in MODULES:
        module = made(name, recipe="fp8-block")
        add_lora(module, 8)
        randomize(module)
        x = torch.randn(2, M // 2, K).bfloat16()
        assert torch.equal(called(module, x).flatten(0, 1), called(module, x.flatten(0, 1)))


def test_given_adapters_take_the_place_of_the_modules_own(rng: np.random.Generator) -> None:
    """`lora=` is for those who keep adapters elsewhere."""
    for name in MODULES:
        module = made(name, recipe="fp8-block")
        twin = copy.deepcopy(module)
        places = add_lora(module, 8)
        randomize(module)
        x = torch.randn(M, K).bfloat16()
        parts = tuple(module.get_submodule(place) for place in places)
        given = parts if len(parts) == 2 else parts[0]
        assert torch.equal(called(twin, x, lora=given), called(module, x))
        assert not torch.equal(called(twin, x), called(module, x))


def test_what_does_not_fit_is_refused(rng: np.random.Generator) -> None:
    """One sentence each, before anything has changed."""
    module = nn.ModuleDict({"experts": made("GroupedMLP", recipe="fp8-block"), "norm": nn.LayerNorm(4)})
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"rank": 0}, "rank is 0; give an integer of at least 1"),
        ({"alpha": 0}, "alpha is 0; give a number above 0"),
        ({"dropout": 1.0}, "dropout is 1.0; give a probability"),
        ({"targets": ["weight3"]}, "targets is a list; give some of weight, weight1, weight2"),
        ({"targets": ["weight"]}, "no weight among weight is selected"),
        ({"filter": "none.*"}, "no weight among weight, weight1, weight2 is selected"),
        ({"dtype": torch.int64}, "dtype is torch.int64"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            add_lora(module, **{"rank": 8, **options})
    assert not [key for key, _ in module.named_modules() if "lora" in key]
    assert all(parameter.requires_grad for parameter in module.parameters())
    with pytest.raises(ValueError, match="module has no adapters"):
        merge_lora(module)
    assert add_lora(module, 8, targets=["weight2"], filter="exp*") == ("experts.lora2",)
    with pytest.raises(ValueError, match=r"experts\.weight2 has an adapter already"):
        add_lora(module, 8)
    assert add_lora(module, 8, targets=["weight1"]) == ("experts.lora1",)
    experts, x = module["experts"], torch.randn(M, K).bfloat16()
    with pytest.raises(ValueError, match="out was given and the layer has adapters"):
        experts(x, SIZES, out=torch.empty(M, K).bfloat16())
    codes = quantize_input(x, experts.weight1, SIZES, "fp8-block", backend=REFERENCE)
    with pytest.raises(ValueError, match="x is a QuantizedInput and the layer has adapters"):
        experts(codes, None)
    with pytest.raises(ValueError, match="lora is a GroupedLoRA; give two"):
        experts(x, SIZES, lora=experts.lora1)
    with pytest.raises(ValueError, match="lora has a Linear; give what has delta"):
        experts(x, SIZES, lora=(nn.Linear(2, 2), None))
    with pytest.raises(ValueError, match=r"groups has 3; give numbers of groups, from 0 to 2"):
        experts.lora1.train_groups([3])
    with pytest.raises(ValueError, match=r"weight is bfloat16 \[3, 64, 48\]; give \[3, 96, 64\]"):
        experts.lora1.merged_weight(experts.weight2)
    with quantized_parameters("fp8-block"):
        coded = made("GroupedMLP")
    add_lora(coded, 8)
    coded.weight1.requires_grad_()
    with pytest.raises(ValueError, match="w1 is codes with interleave=16 and requires a gradient"):
        coded(x, SIZES)
