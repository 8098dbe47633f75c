"""octavo_torch.adapters.frozen: experts of transformers' classes, or of one recorded like them, as codes alone."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from octavo import MXFP8, BlockScaling
from octavo_torch import CodedWeight, GroupedMLP, PackedWeight, export_experts, moe_mlp, save_checkpoint
from octavo_torch.adapters import names_in_files
from octavo_torch.adapters.frozen import freeze_experts

REFERENCE = "torch-reference"
T, H, F, E, C = 20, 128, 128, 4, 2


class Experts(nn.Module):
    """As `use_experts_implementation` of transformers leaves Qwen3-MoE's experts."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * F, H).bfloat16() / 8)
        self.down_proj = nn.Parameter(torch.randn(E, H, F).bfloat16() / 8)

    def _default_apply_gate(self, value: Tensor) -> Tensor:
        raise AssertionError  # Octavo's function has it itself

    _apply_gate = _default_apply_gate


class GptOssExperts(nn.Module):
    """As it leaves gpt-oss's: transposed weights, gate and up in turns, biases."""

    has_gate, has_bias, is_transposed, is_concatenated = True, True, True, False
    alpha, limit = 1.702, 7.0

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, H, 2 * F).bfloat16() / 8)
        self.gate_up_proj_bias = nn.Parameter(torch.randn(E, 2 * F).bfloat16())
        self.down_proj = nn.Parameter(torch.randn(E, F, H).bfloat16() / 8)
        self.down_proj_bias = nn.Parameter(torch.randn(E, H).bfloat16())

    def _apply_gate(self, value: Tensor) -> Tensor:
        raise AssertionError


def model_of(experts: nn.Module) -> nn.Module:
    """Two layers, named as models of transformers name them."""
    layers = [nn.ModuleDict({"mlp": nn.ModuleDict({"experts": copy.deepcopy(experts)})}) for _ in range(2)]
    return nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList(layers)}), "lm_head": nn.Linear(4, 4)})


def routed() -> tuple[Tensor, Tensor, Tensor]:
    index = torch.stack([torch.randperm(E)[:C] for _ in range(T)])
    return torch.randn(T, H).bfloat16().requires_grad_(), index, torch.rand(T, C).requires_grad_()


def results(y: Tensor, x: Tensor, weights: Tensor) -> list[Tensor]:
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, weights])]


def of_values(experts: Any, given: tuple[Tensor, Tensor, Tensor], recipe: str) -> list[Tensor]:
    """The same experts in that recipe, with their weights as values."""
    turned = experts.is_transposed
    w1, w2 = (w.transpose(1, 2) if turned else w for w in (experts.gate_up_proj, experts.down_proj))
    more: dict[str, Any] = {}
    if experts.has_bias:
        more = {"bias1": experts.gate_up_proj_bias, "bias2": experts.down_proj_bias, "interleave": 1}
    y = moe_mlp(
        *given, w1, w2, recipe=recipe, backend=REFERENCE, activation="clamped_swiglu" if turned else "swiglu", **more
    )
    return results(y, given[0], given[2])


@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8", "fp8-row"])
@pytest.mark.parametrize("kind", [Experts, GptOssExperts])
def test_codes_give_the_bits_of_values(kind: type[nn.Module], recipe: str, rng: np.random.Generator) -> None:
    """y, and the gradients of x and of the choices' weights; no expert has values or takes a gradient any more, and the
    rest of the model does as before."""
    experts, given = kind(), routed()
    model = model_of(experts)
    assert freeze_experts(model, recipe, backend=REFERENCE) == (
        "model.layers.0.mlp.experts",
        "model.layers.1.mlp.experts",
    )
    assert model["lm_head"].weight.requires_grad
    frozen = model.get_submodule("model.layers.1.mlp.experts")
    for key, parameter in frozen.named_parameters():
        assert not parameter.requires_grad
        assert isinstance(parameter, CodedWeight) is not key.endswith("bias")
    ours = results(frozen(*given), given[0], given[2])
    for one, two in zip(ours, of_values(experts, given, recipe), strict=True):
        assert torch.equal(one, two)
    twin = copy.deepcopy(model).get_submodule("model.layers.1.mlp.experts")
    assert twin.gate_up_proj is not frozen.gate_up_proj
    assert torch.equal(twin(*given), ours[0])


def test_codes_of_fp8_files(rng: np.random.Generator, tmp_path: Path) -> None:
    """The file's codes are the weights: nothing is quantized again, and the model never has values in memory."""
    saved = nn.ModuleDict(
        {
            f"model_layers_{layer}": GroupedMLP(E, H, F, recipe="fp8-block", dtype=torch.bfloat16, backend=REFERENCE)
            for layer in range(2)
        }
    )
    tree = model_of(nn.Identity())
    for layer in range(2):
        tree.get_submodule(f"model.layers.{layer}.mlp")["experts"] = saved[f"model_layers_{layer}"]
    export_experts(tree, tmp_path, "hf-fp8")
    with torch.device("meta"):
        model = model_of(Experts())
    freeze_experts(model, "fp8-block", path=tmp_path, device="cpu", backend=REFERENCE)
    given = routed()
    for layer in range(2):
        experts = model.get_submodule(f"model.layers.{layer}.mlp.experts")
        source = saved[f"model_layers_{layer}"]
        assert isinstance(experts.gate_up_proj, CodedWeight)
        y = moe_mlp(*given, source.weight1, source.weight2, recipe="fp8-block", backend=REFERENCE)
        for one, two in zip(results(experts(*given), given[0], given[2]), results(y, given[0], given[2]), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("recipe", [BlockScaling(), MXFP8()])
def test_codes_of_mxfp4_files(recipe: Any, rng: np.random.Generator, tmp_path: Path) -> None:
    """gpt-oss's four bits become E4M3 codes with the file's values, in fprop and in dgrad."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    source = GroupedMLP(
        E, H, F, activation="clamped_swiglu", bias=True, interleave=1, recipe=recipe, dtype=torch.bfloat16,
        backend=REFERENCE,
    )  # fmt: skip
    for weight in (source.weight1, source.weight2):
        drawn = values[torch.randint(8, weight.shape)] * torch.randn(weight.shape).sign()
        scale = torch.exp2(torch.randint(-6, 0, (*weight.shape[:2], weight.shape[2] // 32)).float())
        weight.data.copy_(drawn * scale.repeat_interleave(32, 2))
    tree = model_of(nn.Identity())
    for layer in range(2):
        tree.get_submodule(f"model.layers.{layer}.mlp")["experts"] = copy.deepcopy(source)
    export_experts(tree, tmp_path, "gpt-oss-mxfp4")
    with torch.device("meta"):
        model = model_of(GptOssExperts())
    freeze_experts(model, recipe, path=tmp_path, device="cpu", backend=REFERENCE)
    with torch.device("meta"):
        packed = model_of(GptOssExperts())
    freeze_experts(packed, recipe, path=tmp_path, weights="packed", device="cpu", backend=REFERENCE)
    experts, given = model.get_submodule("model.layers.0.mlp.experts"), routed()
    assert isinstance(experts.down_proj, CodedWeight)
    y = moe_mlp(
        *given, source.weight1, source.weight2, recipe=recipe, activation="clamped_swiglu", interleave=1,
        bias1=source.bias1, bias2=source.bias2, backend=REFERENCE,
    )  # fmt: skip
    wanted = results(y, given[0], given[2])
    for one in (experts, packed.get_submodule("model.layers.0.mlp.experts")):
        assert all(map(torch.equal, results(one(*given), given[0], given[2]), wanted))
    assert isinstance(packed.get_submodule("model.layers.1.mlp.experts").gate_up_proj, PackedWeight)


class Renaming:
    """As one of transformers' renames what it reads of Mixtral's files."""

    def rename_source_key(self, source_key: str) -> tuple[str, None]:
        return source_key.replace(".block_sparse_moe.", ".mlp."), None


@pytest.mark.parametrize("prefix", ["", "model."])
def test_files_with_names_of_before(
    prefix: str, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral's and MiniMax-M2's: what transformers renames while it loads a model is found by its own renamings."""
    monkeypatch.setattr(names_in_files, "_renamings", lambda model: [Renaming()])
    saved = GroupedMLP(E, H, F, recipe="fp8-block", dtype=torch.bfloat16, backend=REFERENCE)
    source = nn.ModuleDict({"experts": saved})
    export_experts(source, tmp_path, "hf-fp8", prefix="model.layers.1.block_sparse_moe.", names=("w1", "w3", "w2"))
    with torch.device("meta"):
        model: Any = model_of(Experts())
    del model["model"]["layers"][0]["mlp"]["experts"]
    if prefix:
        model = model["model"]
    names = freeze_experts(model, "fp8-block", path=tmp_path, prefix=prefix, device="cpu", backend=REFERENCE)
    assert names == (f"{'' if prefix else 'model.'}layers.1.mlp.experts",)
    frozen, given = model.get_submodule(names[0]), routed()
    y = moe_mlp(*given, saved.weight1, saved.weight2, recipe="fp8-block", backend=REFERENCE)
    assert torch.equal(frozen(*given), y)


def test_writers_of_values_refuse_codes(tmp_path: Path) -> None:
    """In a sentence that says what stores them; torch.save does."""
    model = model_of(Experts())
    freeze_experts(model, "fp8-block", backend=REFERENCE)
    with pytest.raises(ValueError, match=r"in a module of another library.* write the state_dict with torch\.save"):
        save_checkpoint(model, tmp_path / "values.safetensors")
    with pytest.raises(ValueError, match=r"storage\(\), as of save_pretrained.*torch\.save stores it"):
        safetensors.torch.save_file(dict(model.state_dict()), tmp_path / "values.safetensors")
    torch.save(model.state_dict(), tmp_path / "codes.pt")
    twin = model_of(Experts())
    freeze_experts(twin, "fp8-block", backend=REFERENCE)
    twin.load_state_dict(torch.load(tmp_path / "codes.pt"))
    given, name = routed(), "model.layers.1.mlp.experts"
    assert torch.equal(twin.get_submodule(name)(*given), model.get_submodule(name)(*given))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """One sentence each, and the model stays as it was."""
    model = model_of(Experts())
    before = dict(model.named_parameters())
    other = model_of(Experts())
    other.get_submodule("model.layers.1.mlp.experts").act_fn = nn.Tanh()
    on_meta, offloaded, coded, of_fp8 = (model_of(Experts()) for _ in range(4))
    on_meta.to("meta")
    offloaded.to("meta")
    offloaded.get_submodule("model.layers.0.mlp.experts")._hf_hook = object()  # as accelerate marks them
    freeze_experts(coded, "fp8-block", backend=REFERENCE)
    codes = nn.Parameter(torch.zeros(E, 2 * F, H, dtype=torch.float8_e4m3fn), requires_grad=False)
    of_fp8.get_submodule("model.layers.1.mlp.experts").gate_up_proj = codes
    (tmp_path / "model.safetensors").write_bytes(b"")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (nn.Linear(2, 2), {}, "model has no experts that transformers dispatches"),
        (SimpleNamespace(), {}, "module is a SimpleNamespace"),
        (model, {"recipe": None}, "recipe is high_precision, of which fprop reads the weights' values"),
        (model, {"recipe": MXFP8(dgrad="high_precision")}, "of which dgrad reads the weights' values"),
        (model, {"recipe": "fp8-delayed"}, "recipe is DelayedScaling"),
        (model, {"path": tmp_path}, "model.safetensors"),
        (model, {"weights": "values"}, "weights is 'values'; give 'codes' or 'packed'"),
        (model, {"weights": "packed"}, "weights is 'packed' and path is None"),
        (on_meta, {}, r"path is None and the experts model\.layers\.0\.mlp\.experts are on the meta device"),
        (offloaded, {}, r"the experts model\.layers\.0\.mlp\.experts are offloaded by accelerate"),
        (offloaded, {"path": tmp_path, "device": "cpu"}, "are offloaded by accelerate"),
        (coded, {}, r"path is None and the experts model\.layers\.0\.mlp\.experts are codes alone already"),
        (of_fp8, {}, r"the gate_up_proj of experts model\.layers\.1\.mlp\.experts is float8_e4m3fn, codes of another"),
        (other, {}, r"the experts model\.layers\.1\.mlp\.experts compute an activation that moe_mlp does not have"),
    ]
    for given, more, message in wrong:
        with pytest.raises(ValueError, match=message):
            freeze_experts(given, **{"recipe": "fp8-block", **more})
    assert all(parameter is before[key] for key, parameter in model.named_parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
