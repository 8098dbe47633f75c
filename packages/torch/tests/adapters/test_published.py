"""Exported experts as transformers and compressed-tensors read them: the values that Octavo computes with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import octavo_torch
from octavo import MXFP8, BlockScaling, CurrentScaling, Recipe, RowScaling
from octavo_torch import GroupedMLP, expert_tensors, export_experts, load_experts
from octavo_torch.adapters.frozen import freeze_experts

E, K, F = 2, 256, 128
SCALES = ["powers of two", "fp32", "one per expert"]
REASON = "it is not installed; `nox -s adapters` installs it"
CONFIG = {
    "vocab_size": 32, "hidden_size": K, "intermediate_size": F, "moe_intermediate_size": F, "head_dim": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": E,
    "num_local_experts": E, "num_experts_per_tok": 1, "max_position_embeddings": 64,
}  # fmt: skip


def inside(experts: GroupedMLP) -> nn.Module:
    """Under the path that a model of one layer has."""
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})})])})


def mlp(recipe: Recipe, **more: Any) -> GroupedMLP:
    return GroupedMLP(E, K, F, recipe=recipe, backend="torch-reference", **more)


def values(experts: GroupedMLP) -> list[Tensor]:
    """What the forward reads, of weights that are codes or values."""
    weights = (experts.weight1, experts.weight2)
    codes = [octavo_torch.quantize_weight(one, experts.recipe, backend="torch-reference").codes for one in weights]
    return [octavo_torch.dequantize(one) for one in codes]  # type: ignore[arg-type]


def to_mxfp4_values(experts: GroupedMLP) -> None:
    """Gives the weights values that MXFP4 holds."""
    with torch.no_grad():
        for weight in (experts.weight1, experts.weight2):  # what MXFP4 holds
            weight.copy_(torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[torch.randint(8, weight.shape)])
            weight.mul_(
                2.0 ** -torch.randint(4, 10, (*weight.shape[:2], weight.shape[2] // 32)).repeat_interleave(32, 2)
            )


def whole_model(kind: str, folder: Path, experts: GroupedMLP, layout: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of transformers from the exported folder, and the other tensors that went into it."""
    transformers = pytest.importorskip("transformers", reason=REASON)
    pytest.importorskip("accelerate", reason=REASON)
    config = getattr(transformers, f"{kind}Config")(**CONFIG)
    made = getattr(transformers, f"{kind}ForCausalLM")(config)
    others = {name: value for name, value in made.state_dict().items() if ".experts." not in name}
    export_experts(
        inside(experts), folder, layout, prefix="model.", others=others, config=json.loads(config.to_json_string())
    )
    read = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(folder, dtype=torch.float32)
    return read, others


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", [BlockScaling(), BlockScaling(power_of_two=False), CurrentScaling()], ids=SCALES)
def test_transformers_reads_fp8(recipe: Recipe, rng: np.random.Generator, tmp_path: Path) -> None:
    """A whole Qwen3-MoE from one folder: its experts have our values, everything else is as it was."""
    experts = mlp(recipe)
    read, others = whole_model("Qwen3Moe", tmp_path / "fp8", experts, "hf-fp8")
    own = read.model.layers[0].mlp.experts
    first, second = values(experts)
    assert torch.equal(own.gate_up_proj, first)
    assert torch.equal(own.down_proj, second)
    state = read.state_dict()
    assert all(torch.equal(state[name], value) for name, value in others.items())


@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_mxfp4(rng: np.random.Generator, tmp_path: Path) -> None:
    """A whole gpt-oss from one folder, with its biases and its gates in turns."""
    experts = mlp(BlockScaling(), activation="clamped_swiglu", bias=True)
    to_mxfp4_values(experts)
    read, _ = whole_model("GptOss", tmp_path / "mxfp4", experts, "gpt-oss-mxfp4")
    own = read.model.layers[0].mlp.experts
    first, second = values(experts)
    assert torch.equal(own.gate_up_proj[..., ::2].transpose(1, 2), first[:, :F])
    assert torch.equal(own.gate_up_proj[..., 1::2].transpose(1, 2), first[:, F:])
    assert torch.equal(own.down_proj.transpose(1, 2), second)
    assert torch.equal(own.gate_up_proj_bias[:, ::2], experts.bias1[:, :F])  # type: ignore[index]
    assert torch.equal(own.down_proj_bias, experts.bias2)


@pytest.mark.filterwarnings("ignore")
def test_codes_of_files_whose_names_transformers_changes(rng: np.random.Generator, tmp_path: Path) -> None:
    """Mixtral's mlp is block_sparse_moe in its files, as MiniMax-M2's is."""
    transformers = pytest.importorskip("transformers", reason=REASON)
    source, name = mlp(BlockScaling()), "model.layers.0.block_sparse_moe"
    export_experts(source, tmp_path, "hf-fp8", prefix=name, names=("w1", "w3", "w2"))
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**CONFIG | {"intermediate_size": F}))
    frozen = freeze_experts(model, BlockScaling(), path=tmp_path, device="cpu", backend="torch-reference")
    assert frozen == ("model.layers.0.mlp.experts",)
    own = model.get_submodule(frozen[0])
    for weight, wanted in zip((own.gate_up_proj, own.down_proj), values(source), strict=True):
        assert torch.equal(octavo_torch.dequantize(weight.codes), wanted)


COMPRESSED: dict[str, tuple[Recipe, str]] = {
    "block": (BlockScaling(), "compressed-tensors"),
    "channel": (RowScaling(), "compressed-tensors"),
    "tensor": (CurrentScaling(), "compressed-tensors"),
    "mxfp8": (MXFP8(), "compressed-tensors"),
    "mxfp4": (BlockScaling(), "compressed-tensors-mxfp4"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", COMPRESSED)
def test_compressed_tensors_decompresses(which: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """By the scheme that our quantization_config names: blocks, channels or the whole tensor."""
    pytest.importorskip("compressed_tensors", reason=REASON)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    recipe, layout = COMPRESSED[which]
    experts = mlp(recipe)
    if which == "mxfp4":
        to_mxfp4_values(experts)
    export_experts(inside(experts), tmp_path / "out", layout, prefix="model.")  # type: ignore[arg-type]
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(said)
    scheme, compressor = config.config_groups["group_0"], BaseCompressor.get_value_from_registry(config.format)
    pairs = dict(expert_tensors(inside(experts), layout, prefix="model."))  # type: ignore[arg-type]
    first, second = values(experts)
    for expert in range(E):
        for name, wanted in (
            ("gate_proj", first[expert, :F]),
            ("up_proj", first[expert, F:]),
            ("down_proj", second[expert]),
        ):
            whole = f"model.layers.0.mlp.experts.{expert}.{name}"
            start = f"{whole}."
            state = {name.removeprefix(start): value for name, value in pairs.items() if name.startswith(start)}
            assert torch.equal(compressor.decompress(state, scheme)["weight"].float(), wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", ["FP8_BLOCK", "FP8_DYNAMIC"])
def test_what_compressed_tensors_compresses_is_loaded(strategy: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Its codes and scales, by its own compressor: both planes have the values that it decompresses to."""
    pytest.importorskip("compressed_tensors", reason=REASON)
    from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from safetensors.torch import save_file

    scheme = preset_name_to_scheme(strategy, ["Linear"])
    blocks = strategy == "FP8_BLOCK"
    tensors, wanted = {}, {}
    for expert in range(E):
        for name, shape in (("gate_proj", (F, K)), ("up_proj", (F, K)), ("down_proj", (K, F))):
            weight = torch.randn(shape)
            parts = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)) if blocks else weight[:, None, None, :]
            scale = parts.abs().amax((1, 3)) / 448
            state = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
            whole = f"experts.{expert}.{name}"
            tensors |= {f"{whole}.{kind}": value.contiguous() for kind, value in state.items()}
            wanted.setdefault(name, []).append(FloatQuantizationCompressor.decompress(state, scheme)["weight"])
    save_file(tensors, str(tmp_path / "model.safetensors"))
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format="float-quantized", quantization_status="compressed"
    )
    said = json.loads(config.model_dump_json())
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    forward = {} if blocks else {"dgrad": "high_precision", "wgrad": "high_precision"}
    recipe = (BlockScaling if blocks else RowScaling)(power_of_two=False, **forward)  # type: ignore[arg-type]
    experts = mlp(recipe)
    assert load_experts(experts, tmp_path) == {}
    first = torch.cat([torch.stack(wanted["gate_proj"]), torch.stack(wanted["up_proj"])], 1)
    for weight, values_of in ((experts.weight1, first), (experts.weight2, torch.stack(wanted["down_proj"]))):
        for direction in weight.codes.spec.quantizer.directions:  # type: ignore[attr-defined]
            assert torch.equal(octavo_torch.dequantize(weight.codes, direction), values_of)  # type: ignore[attr-defined]
