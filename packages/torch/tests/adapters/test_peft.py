"""octavo_torch.adapters.peft and .frozen inside PEFT and transformers, where these are installed."""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from low_rank_oracle import watched
from torch import Tensor, nn

import octavo_numerics
from octavo import HighPrecision
from octavo_torch import CodedWeight, GroupedLinear, GroupedLoRA, GroupedMLP, MoE, add_lora, quantized_parameters
from octavo_torch.adapters.frozen import freeze_experts
from octavo_torch.adapters.grouped_mm import AdapterError
from octavo_torch.adapters.peft import prepare
from octavo_torch.adapters.transformers import register

# PEFT 0.21.2 asks transformers by names that 5.23 has just changed
pytestmark = pytest.mark.filterwarnings(r"ignore:.*gradient_checkpointing\w*` is deprecated")

REFERENCE = "torch-reference"
H, INNER, E, R = 64, 96, 4, 8
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
TINY = {
    "vocab_size": 64, "hidden_size": H, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts_per_tok": 2, "num_hidden_layers": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3Moe", {"moe_intermediate_size": INNER, "num_experts": E}),
    "gpt-oss": ("GptOss", {"num_local_experts": E, "sliding_window": 32}),
}


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="it is not installed; `nox -s adapters` installs it")


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, rng: np.random.Generator) -> Any:
    """A tiny model of transformers, whose experts' results are as large as what they are added to."""
    transformers = pytest.importorskip("transformers", reason="it is not installed; `nox -s adapters` installs it")
    name, more = MODELS[request.param]
    made = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**TINY, **more))
    for key, parameter in made.named_parameters():
        if ".experts." in key:
            nn.init.normal_(parameter, std=0.0 if "bias" in key else 0.1)
    return made.bfloat16()


def config(peft: Any, **more: Any) -> Any:
    return peft.LoraConfig(**{"r": R, "lora_alpha": 16, "target_modules": [], "target_parameters": TARGETS, **more})


def randomized(model: nn.Module) -> list[nn.Parameter]:
    """Every adapter's parameters, B other than zero."""
    own = [parameter for key, parameter in model.named_parameters() if "lora_" in key]
    for parameter in own:
        nn.init.normal_(parameter, std=0.1)
    return own


def tokens() -> Tensor:
    return torch.randint(0, TINY["vocab_size"], (2, 12))


@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", "nvfp4"])
def test_experts_train_over_codes(peft: Any, model: Any, recipe: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Every adapter's delta and gradients are float64's, of what it reads, and not zero; the experts are codes alone;
    a saved adapter has PEFT's names and gives the same bits in another model."""
    ids = tokens()
    plain = peft.get_peft_model(copy.deepcopy(model), config(peft))
    other = copy.deepcopy(model)
    names = freeze_experts(model, recipe, backend=REFERENCE, seed=1)
    assert names == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    before = model(input_ids=ids).logits
    adapted = peft.get_peft_model(model, prepare(config(peft), model))
    assert torch.equal(adapted(input_ids=ids).logits, before)
    own = randomized(adapted)
    with watched() as seen:
        adapted(input_ids=ids, labels=ids).loss.backward()
    assert len(seen) == 4
    for one in seen:
        one.check()
    assert all(bool(parameter.grad.any()) for parameter in own)
    for key, parameter in adapted.named_parameters():
        assert ("lora_" in key) is parameter.requires_grad is (parameter.grad is not None)
        if "experts" in key and "proj" in key and "bias" not in key:
            assert isinstance(parameter, CodedWeight)
    logits = adapted(input_ids=ids).logits
    assert not torch.equal(logits, before)
    with adapted.disable_adapter():
        assert torch.equal(adapted(input_ids=ids).logits, before)
    theirs, ours = (
        {key: value.shape for key, value in peft.get_peft_model_state_dict(each).items()} for each in (plain, adapted)
    )
    assert ours == theirs
    adapted.save_pretrained(tmp_path)
    freeze_experts(other, recipe, backend=REFERENCE, seed=1)
    stored = prepare(peft.PeftConfig.from_pretrained(tmp_path), other)
    loaded = peft.PeftModel.from_pretrained(other, tmp_path, config=stored)
    assert torch.equal(loaded(input_ids=ids).logits, logits)


def test_recomputed_layers_have_the_same_gradients(peft: Any, model: Any, rng: np.random.Generator) -> None:
    """transformers' gradient checkpointing, and the experts' own form "recompute"."""
    ids, grads = tokens(), []
    other = copy.deepcopy(model)
    for one, form in ((model, "standard"), (other, "recompute")):
        freeze_experts(one, "fp8-block", backend=REFERENCE, form=form)
    models = [peft.get_peft_model(one, prepare(config(peft), one)) for one in (model, other)]
    values = [parameter.detach().clone() for parameter in randomized(models[0])]
    for one in models:
        for parameter, value in zip((p for k, p in one.named_parameters() if "lora_" in k), values, strict=True):
            parameter.data.copy_(value)
    for one, checkpointing in ((models[0], False), (models[0], True), (models[1], False)):
        if checkpointing:
            one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            one.train()
        one.zero_grad()
        one(input_ids=ids, labels=ids).loss.backward()
        grads.append([p.grad.clone() for k, p in one.named_parameters() if "lora_" in k])
    for first, second, third in zip(*grads, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def tolerance(passes: int) -> float:
    """Of fp32 results against float64's, relative to their norm: T2 of each product on the way, forward and back.

    What stands before the activation counts twice: where the slope of x sigmoid(x) is not small, its relative change is
    below twice that of x. An adapter's product has its error beside the weight's, which has another input of its size.
    """
    limits = [
        octavo_numerics.error_bound(HighPrecision(), k, out_dtype="float32").norm_limit("whole")
        for k in (H, H, R, INNER, INNER, R)
    ]
    return passes * (2 * sum(limits[:3]) + sum(limits[3:]))


def test_an_adapter_of_pefts_gives_its_results(peft: Any, model: Any, tmp_path: Path) -> None:
    """An adapter that PEFT has made over grouped values, stored and loaded here: the experts' results and the gradients
    of x, A and B are those that PEFT itself computes in float64."""
    double = copy.deepcopy(model).double()
    double.set_experts_implementation("eager")  # the one that takes float64
    double = peft.get_peft_model(double, config(peft, use_rslora=True))
    randomized(double)
    double.save_pretrained(tmp_path)
    single = model.float()
    single.set_experts_implementation(register(None, backend=REFERENCE))
    stored = prepare(peft.PeftConfig.from_pretrained(tmp_path), single)
    ours = peft.PeftModel.from_pretrained(single, tmp_path, config=stored, is_trainable=True)
    x = torch.randn(40, H, dtype=torch.float64)
    index = torch.stack([torch.randperm(E)[:2] for _ in range(40)])
    weights = torch.rand(40, 2, dtype=torch.float64)
    results = []
    for each, dtype in ((ours, torch.float32), (double, torch.float64)):
        experts = each.get_submodule("base_model.model.model.layers.1.mlp.experts")
        leaf = x.to(dtype).requires_grad_()
        y = experts(leaf, index, weights.to(dtype))
        factors = [p for k, p in experts.named_parameters() if "lora_" in k]
        assert len(factors) == 4
        results.append([y.detach(), *torch.autograd.grad(y.sum(), [leaf, *factors])])
    for number, (actual, wanted) in enumerate(zip(*results, strict=True)):
        error = float((actual.double() - wanted).norm() / wanted.norm())
        assert error <= tolerance(1 if number == 0 else 2), (number, error)


class Grouped(nn.Module):
    """A model of this library's own layers."""

    def __init__(self) -> None:
        super().__init__()
        with quantized_parameters("fp8-block"):
            how: dict[str, Any] = {"dtype": torch.bfloat16, "backend": REFERENCE}
            self.proj = GroupedLinear(E, H, H, **how)
            self.experts = GroupedMLP(E, H, INNER, interleave=16, **how)
            self.moe = MoE(E, H, INNER, 2, **how)

    def forward(self, x: Tensor) -> Tensor:
        sizes = [7, 0, 3, 8]
        y: Tensor = self.moe(self.experts(self.proj(x, sizes), sizes))
        return y


@pytest.mark.parametrize("as_module", [False, True])
def test_layers_of_this_library(peft: Any, as_module: bool, rng: np.random.Generator) -> None:
    """The bits of add_lora with the same factors: y and the gradients of x and of every factor."""
    model = Grouped()
    twin = copy.deepcopy(model)
    places = add_lora(twin, R, alpha=16, dtype=torch.float32)
    assert places == ("proj.lora", "experts.lora1", "experts.lora2", "moe.lora1", "moe.lora2")
    weights = ["experts.weight1", "experts.weight2", "moe.weight1", "moe.weight2"]
    targets = {"target_parameters": weights if as_module else [*weights, "proj.weight"]}
    chosen = config(peft, **targets, target_modules=["proj"] if as_module else [])
    adapted = peft.get_peft_model(model, prepare(chosen, model))
    randomized(adapted)
    wrappers = {
        f"{key.rpartition('.')[2] if not key.endswith('base_layer') else key.split('.')[-2]}.{one.parameter_name}": one
        for key, one in adapted.named_modules()
        if type(one).__name__ == "ParamWrapper"
    }
    pairs: list[tuple[Tensor, nn.Parameter]] = []
    for place in places:
        lora, one = twin.get_submodule(place), wrappers[place.replace("lora", "weight")]
        assert isinstance(lora, GroupedLoRA)
        a, b = one._factors("default")
        lora.lora_A.data.copy_(a)
        lora.lora_B.data.copy_(b)
        pairs += [(one.lora_A["default"].weight, lora.lora_A), (one.lora_B["default"].weight, lora.lora_B)]
    x = torch.randn(18, H).bfloat16().requires_grad_()
    results = []
    for function, leaves in ((adapted, [a for a, _ in pairs]), (twin, [b for _, b in pairs])):
        y = function(x)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *leaves])])
    for number, (ours, theirs) in enumerate(zip(*results, strict=True)):
        if number >= 2:  # A [G r, K] and B [N, r G]
            groups_last = number % 2
            theirs = theirs.permute(1, 2, 0).reshape(ours.shape) if groups_last else theirs.reshape(ours.shape)
        assert torch.equal(ours, theirs)
        assert bool(ours.any())


def test_several_adapters(peft: Any, rng: np.random.Generator) -> None:
    """Active ones add up; what is not active adds nothing."""
    model = Grouped()
    chosen = config(peft, target_parameters=["experts.weight2"])
    adapted = peft.get_peft_model(model, prepare(chosen, model))
    adapted.add_adapter("other", prepare(config(peft, target_parameters=["experts.weight2"], r=4), model))
    randomized(adapted)
    x, results = torch.randn(18, H).bfloat16(), {}
    for active in (["default"], ["other"], ["default", "other"]):
        adapted.base_model.set_adapter(active)
        with watched() as seen:
            results[tuple(active)] = adapted(x)
        assert [one.factors.a.shape[1] for one in seen] == [{"default": R, "other": 4}[name] for name in active]
    assert not any(torch.equal(one, two) for one, two in itertools.combinations(results.values(), 2))


def test_merging(peft: Any, rng: np.random.Generator) -> None:
    """PEFT merges into values, and takes it back; codes are refused."""
    model = Grouped()
    adapted = peft.get_peft_model(model, prepare(config(peft, target_parameters=["proj.weight"]), model))
    randomized(adapted)
    with pytest.raises(ValueError, match="weight is codes alone, which would round the sum"):
        adapted.merge_adapter()
    valued = nn.ModuleDict({"proj": GroupedLinear(E, H, H, recipe=None, backend=REFERENCE)})
    adapted = peft.get_peft_model(valued, prepare(config(peft, target_parameters=["proj.weight"]), valued))
    randomized(adapted)
    layer = valued["proj"]
    delta = layer.get_delta_weight("default")
    before = layer.get_param().detach().clone()
    adapted.merge_adapter()
    assert torch.equal(layer.get_param(), before + delta)
    with watched() as seen:
        layer(torch.randn(8, H), [2, 2, 2, 2])
    assert not seen
    adapted.unmerge_adapter()
    layer(torch.randn(8, H), [2, 2, 2, 2])


def test_what_does_not_fit_is_refused(peft: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a sentence that says what to give."""
    with pytest.raises(ValueError, match=r"the experts model\.layers\.0\.mlp\.experts run another function"):
        prepare(config(peft), model)
    model.set_experts_implementation(register(None, backend=REFERENCE))
    adapted = peft.get_peft_model(model, prepare(config(peft), model))
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match=r"the experts \w+ run another function than Octavo's"):
        adapted(input_ids=tokens())
    with pytest.raises(ValueError, match=r"config is a dict; give a peft\.LoraConfig"):
        prepare({}, model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model has no grouped weights"):
        prepare(config(peft), nn.Linear(2, 2))
    own = Grouped()
    chosen = config(peft, target_modules=["experts"], target_parameters=None)
    with pytest.raises(
        ValueError, match=r"the module of GroupedMLP cannot take adapters; .* end in weight1 or weight2"
    ):
        peft.get_peft_model(own, prepare(chosen, own))
    own = Grouped()
    chosen = prepare(config(peft, target_parameters=["proj.weight"], lora_dropout=0.1), own)
    with pytest.raises(ValueError, match="does not work with lora_dropout"):
        peft.get_peft_model(own, chosen)


def test_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names what is needed and how to get it."""
    from octavo_torch.adapters import peft as adapter

    monkeypatch.setitem(sys.modules, "peft.tuners.lora.layer", None)
    adapter._wrapper.cache_clear()

    class Config:
        def _register_custom_module(self, mapping: object) -> None:
            raise AssertionError

    with pytest.raises(AdapterError, match=r"peft .*tuners\.lora\.layer\.ParamWrapper"):
        adapter.prepare(Config(), Grouped())  # type: ignore[arg-type]
    monkeypatch.undo()
    adapter._wrapper.cache_clear()
    assert importlib.import_module("octavo_torch.adapters.peft") is adapter
