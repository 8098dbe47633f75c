"""add_lora and merge_lora: where adapters go, what weights become with them, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from lora_modules import MODULES, REFERENCE, SIZES, F, G, K, M, called, made, randomize, rows
from low_rank_oracle import Near, assert_near, exact, product, rounded, scaled
from rank_work.fsdp_gathered import change_what_was_gathered
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from octavo_torch import (
    AdamW,
    CodedWeight,
    GroupedLinear,
    GroupedLoRA,
    Sequential,
    add_lora,
    dequantize,
    merge_lora,
    quantize_input,
    quantized_parameters,
)
from octavo_torch.arrays.interleaving import from_halves
from octavo_torch.mlp.activation_module import Activation


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


@pytest.mark.parametrize("both", [False, True])
def test_tied_weights_are_not_merged(both: bool, rng: np.random.Generator) -> None:
    """The other layer would get the sum, too. One module in two places is merged once."""
    layers = torch.nn.ModuleList([made("GroupedLinear", recipe=None) for _ in "ab"])
    layers[1].weight = layers[0].weight
    add_lora(layers, 8, filter=None if both else "0")
    randomize(layers)
    before = layers[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"0\.weight is tied: 0\.weight and 1\.weight are one parameter"):
        merge_lora(layers)
    assert torch.equal(layers[0].weight, before)
    twice = torch.nn.ModuleList([layers[0], layers[0]])
    delta = layers[0].lora.delta_weight()  # type: ignore[operator, union-attr]
    assert merge_lora(twice) == ("0.lora",)
    assert torch.equal(layers[0].weight, (before.float() + delta).to(before.dtype))


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
        with torch.autocast("cpu", torch.bfloat16):  # which would multiply B and A in bf16
            assert adapter.delta_weight().dtype is torch.float32
            assert torch.equal(adapter.merged_weight(module.get_parameter(weight)), merged)


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
        ({"targets": ["weight3"]}, r"targets is \['weight3'\]; give some of weight, weight1, weight2"),
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
    computed = made("GroupedLinear")
    register_parametrization(computed, "weight", nn.Tanh())
    add_lora(computed, 8)
    with pytest.raises(ValueError, match=r"weight is not a parameter of its module: .*; remove that first"):
        merge_lora(computed)
    assert isinstance(computed.lora, GroupedLoRA)


def test_an_optimizer_leaves_what_is_frozen_alone(rng: np.random.Generator) -> None:
    """One that has stepped the weights before: zeros in their gradients would let them decay."""
    layer = made("GroupedLinear")
    optimizer = AdamW(layer.parameters(), lr=0.1)
    called(layer, rows()).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    before = [layer.weight.clone(), layer.bias.clone()]
    add_lora(layer, 8)
    optimizer.add_param_group({"params": [*layer.lora.parameters()]})
    called(layer, rows()).sum().backward()
    optimizer.step()
    assert bool(layer.lora.lora_B.any())
    assert all(map(torch.equal, before, (layer.weight, layer.bias)))


def test_a_weight_that_is_computed_is_frozen(rng: np.random.Generator) -> None:
    """By a parametrization, which has the parameters: the adapters alone learn."""
    layer = made("GroupedLinear")
    register_parametrization(layer, "weight", nn.Tanh())
    add_lora(layer, 8)
    assert {name for name, parameter in layer.named_parameters() if parameter.requires_grad} == {
        "lora.lora_A", "lora.lora_B"
    }  # fmt: skip


def test_weights_that_fsdp_has_gathered(ranks: Ranks) -> None:
    """After a forward a module may have gathered copies: merging changes the shards, and not what is dropped next."""
    for equal, told in ranks(change_what_was_gathered):
        assert equal == [True, True]
        assert told == [
            "weight1 is sharded; add adapters before FSDP2 shards it",
            "weight1 is sharded; give the module before it is sharded",
        ]
