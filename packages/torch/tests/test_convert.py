"""convert: another recipe for experts by name, in place, with parameters, names, hooks and copies as they were."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from rank_work.fsdp_gathered import convert_what_was_gathered
from ranks import Ranks
from torch import Tensor, nn

import octavo
from octavo_torch import GroupedLinear, GroupedMLP, MoE, PackedWeight, convert
from octavo_torch.adapters.grouped_mm import GroupedMM
from octavo_torch.adapters.transformers import experts

G, K, M = 3, 32, 24
SIZES = [9, 0, 12]
BACKEND = "torch-reference"


class Dispatched(nn.Module):
    """Experts as transformers decorates them."""

    def __init__(self) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed, self.is_concatenated = True, False, False, True
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(G, 2 * K, K))
        self.down_proj = nn.Parameter(torch.randn(G, K, K))

    def _default_apply_gate(self, value: Tensor) -> Tensor:
        gate, up = value.chunk(2, -1)
        return self.act_fn(gate) * up

    _apply_gate = _default_apply_gate

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise AssertionError


class Seam(nn.Module):
    """Experts with torchtitan's seam."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(G, K, K))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        return self._grouped_mm(A=x, B_t=self.w1.transpose(1, 2), offs=ends)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        raise AssertionError


def model() -> nn.Module:
    """Two blocks with every kind of experts and a layer that is none."""
    blocks = [
        nn.ModuleDict(
            {
                "dense": nn.Linear(K, K),
                "experts": GroupedLinear(G, K, K, backend=BACKEND),
                "mlp": GroupedMLP(G, K, K, backend=BACKEND, seed=1),
                "dispatched": Dispatched(),
                "seam": Seam(),
            }
        )
        for _ in range(2)
    ]
    return nn.Sequential(*blocks)


def test_every_kind_of_experts_runs_the_recipe(rng: np.random.Generator) -> None:
    """The bits of each kind's own call with it; parameters stay the same objects, and so do the keys of checkpoints."""
    made = model()
    before = dict(made.named_parameters())
    keys = list(made.state_dict())
    names = convert(made, "mxfp8", backend=BACKEND)
    assert names == tuple(f"{block}.{name}" for block in (0, 1) for name in ("experts", "mlp", "dispatched", "seam"))
    assert all(value is before[name] for name, value in made.named_parameters())
    assert list(made.state_dict()) == keys
    block: Any = made[0]
    x, index, weights = torch.randn(M, K), torch.from_numpy(rng.integers(0, G, (M, 2))), torch.rand(M, 2)
    twin = GroupedLinear(G, K, K, recipe=octavo.MXFP8(), backend=BACKEND)
    twin.load_state_dict(block["experts"].state_dict())
    assert torch.equal(block["experts"](x, SIZES), twin(x, SIZES))
    assert block["mlp"].recipe == octavo.MXFP8()
    expected = experts("mxfp8", backend=BACKEND)(block["dispatched"], x, index, weights)
    assert torch.equal(block["dispatched"](x, index, weights), expected)
    ends = torch.cumsum(torch.tensor(SIZES), 0, dtype=torch.int32)
    product = GroupedMM("mxfp8", backend=BACKEND)
    assert torch.equal(block["seam"](x, torch.tensor(SIZES)), product(x, block["seam"].w1.transpose(1, 2), ends))


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("*.mlp", ("0.mlp", "1.mlp")),
        ("1.*", ("1.experts", "1.mlp", "1.dispatched", "1.seam")),
        (lambda name, module: isinstance(module, Seam) and name < "1", ("0.seam",)),
    ],
    ids=["pattern", "another", "function"],
)
def test_a_filter_takes_some(which: Any, expected: tuple[str, ...]) -> None:
    """By whole names or by what a function says; the others are left alone."""
    made = model()
    assert convert(made, octavo.BlockScaling(), which, backend=BACKEND) == expected
    left: Any = made[0]
    assert left["experts"].recipe == octavo.HighPrecision()


def test_a_moe_layer_is_converted(rng: np.random.Generator) -> None:
    """It runs the recipe afterwards, with the states of both of its layers; it was left alone before."""
    layer = MoE(G, K, K, 2, recipe=None, backend=BACKEND)
    router = layer.router
    assert convert(layer, octavo.DelayedScaling(history=4), backend=BACKEND) == ("",)
    assert layer.amax_history.shape == (2, 3, 4, G)
    assert convert(layer, "mxfp8", backend=BACKEND) == ("",)
    assert layer.router is router
    twin = MoE(G, K, K, 2, recipe="mxfp8", backend=BACKEND)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(M, K)
    assert torch.equal(layer(x), twin(x))


def test_a_layers_own_backends_stay() -> None:
    """A closed list holds until another one is given: no other backend replaces the ones that were chosen."""
    layer = GroupedLinear(G, K, K, backend=BACKEND)
    convert(layer, "mxfp8")
    assert layer.backend == BACKEND
    convert(layer, "mxfp8", backend=[BACKEND, "torch-native"])
    assert layer.backend == (BACKEND, "torch-native")


def test_a_recipe_with_a_state_begins_anew(rng: np.random.Generator) -> None:
    """Buffers come with the recipe that needs them and go with it; copies and pickles are converted, too."""
    layer = GroupedMLP(G, K, K, backend=BACKEND)
    x = torch.randn(M, K)
    plain = layer(x, SIZES)
    convert(layer, octavo.DelayedScaling(history=4), backend=BACKEND)
    assert set(layer.state_dict()) == {"weight1", "weight2", "amax_history", "encode_scale"}
    assert layer.amax_history.shape == (2, 3, 4, G)
    layer(x, SIZES)
    layer.update_scales()
    assert layer.encode_scale.unique().numel() > 1
    convert(layer, octavo.NVFP4(), seed=7, backend=BACKEND)
    assert set(layer.state_dict()) == {"weight1", "weight2", "seed_base", "seed_counter"}
    assert int(layer.seed_base) == 7
    convert(layer, None, backend=BACKEND)
    assert torch.equal(layer(x, SIZES), plain)
    for kind in (Dispatched(), Seam()):
        convert(kind, "block", backend=BACKEND)
        for twin in (copy.deepcopy(kind), pickle.loads(pickle.dumps(kind))):
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
            given = (
                (x, torch.tensor(SIZES)) if isinstance(kind, Seam) else (x, torch.ones(M, 1).long(), torch.ones(M, 1))
            )
            assert not twin(*given).any()
            assert kind(*given).any()


def test_hooks_of_accelerate_stay(rng: np.random.Generator) -> None:
    """They are a forward of the module's own, which brings offloaded weights and calls what was there; recorded from
    accelerate's add_hook_to_module."""
    module = Dispatched()
    weights = dict(module.named_parameters())
    module.to("meta")

    def hooked(*given: Tensor) -> Tensor:
        for name, value in weights.items():
            module._parameters[name] = value
        y: Tensor = module._old_forward(*given)
        module.to("meta")
        return y

    module._hf_hook, module._old_forward, module.forward = object(), module.forward, hooked  # type: ignore[assignment]
    convert(module, "block", backend=BACKEND)
    given = torch.randn(M, K), torch.ones(M, 1).long(), torch.ones(M, 1)
    twin = Dispatched()
    twin.load_state_dict(weights)
    assert torch.equal(module(*given), experts("block", backend=BACKEND)(twin, *given))
    assert module.down_proj.is_meta


def of_fp8() -> nn.Module:
    """Experts as transformers has them of an FP8 file."""
    experts = Dispatched()
    for name in ("gate_up_proj", "down_proj"):
        codes = getattr(experts, name).detach().to(torch.float8_e4m3fn)
        setattr(experts, name, nn.Parameter(codes, requires_grad=False))
    return experts


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((3, None), r"model is 3; give a torch\.nn\.Module"),
        ((nn.Linear(2, 2), None), "model has no experts; give one with"),
        (
            (nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])}), None),
            r"experts is a list of 2 modules: put a GroupedMLP in its place, .* octavo_torch\.stack_experts",
        ),
        ((GroupedLinear(G, K, K), 5), "recipe is 5; give a Recipe or the name of one"),
        ((GroupedLinear(G, K, K), None, 5), "filter is 5; give a pattern of names"),
        (
            (GroupedLinear(G, K, K), None, "x.*"),
            "filter matches none of .* names among ''",
        ),
        ((Seam(), octavo.DelayedScaling()), "which takes its scales from history"),
        ((of_fp8(), None), "the gate_up_proj of experts model is float8_e4m3fn, codes of another library with scales"),
    ],
)
def test_arguments_that_do_not_fit(arguments: tuple[Any, ...], sentence: str) -> None:
    """Refused in sentences, before anything has changed."""
    with pytest.raises(ValueError, match=sentence):
        convert(*arguments)


def test_nothing_changes_where_one_is_refused() -> None:
    """A stateful recipe for all of a model's experts, of which some can keep no state."""
    made = model()
    with pytest.raises(ValueError, match="takes its scales from history"):
        convert(made, octavo.DelayedScaling())
    first: Any = made[0]
    assert first["experts"].recipe == octavo.HighPrecision()


def packed_mlp(recipe: str | None) -> GroupedMLP:
    """An MLP whose weights are MXFP4 alone."""
    mlp = GroupedMLP(G, K, K, recipe=recipe, dtype=torch.bfloat16, backend=BACKEND)
    for name, rows in (("weight1", 2 * K), ("weight2", K)):
        blocks = torch.randint(256, (G, rows, K // 2), dtype=torch.uint8)
        scales = torch.randint(120, 124, (G, rows, K // 32), dtype=torch.uint8)
        weight = PackedWeight(blocks, scales, mlp.recipe, torch.bfloat16)
        mlp._parameters[name] = nn.Parameter(weight, requires_grad=False)
    return mlp


def test_weights_that_expand_to_codes_of_another_recipe(rng: np.random.Generator) -> None:
    """MXFP4 that expands to codes keeps its recipe, which is said before anything changes; values serve any recipe."""
    x, of_codes, of_values = torch.randn(M, K, dtype=torch.bfloat16), packed_mlp("fp8-block"), packed_mlp(None)
    before = of_codes(x, SIZES)
    with pytest.raises(ValueError, match=r"experts\.weight1 is MXFP4 alone, which each call expands to codes of block"):
        convert(nn.ModuleDict({"experts": of_codes}), "mxfp8")
    assert of_codes.recipe.kind == "block"
    assert torch.equal(of_codes(x, SIZES), before)
    convert(of_values, "mxfp8")
    values = GroupedMLP(G, K, K, recipe="mxfp8", dtype=torch.bfloat16, backend=BACKEND)
    for name in ("weight1", "weight2"):
        values._parameters[name] = nn.Parameter(of_values.get_parameter(name).dequantize())
    assert torch.equal(of_values(x, SIZES), values(x, SIZES))


def test_codes_that_fsdp_has_gathered(ranks: Ranks) -> None:
    """After a forward a module may have gathered codes of its old recipe, which are not its weights; torch can gather
    nothing but codes of the same kind in their place."""
    for equal, told in ranks(convert_what_was_gathered):
        assert equal == [True, True]
        assert told.startswith("FSDP2 has gathered weight1 as codes of block and would gather it as codes of mxfp8")
