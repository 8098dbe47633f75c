"""load_experts and export_experts: quantized files of published models to codes and back, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
import torch
from code_planes import planes
from published import PATH, E, F, K, Published
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import octavo_torch
from octavo import MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling, MXFP4Weights, Recipe, RowScaling
from octavo_torch import (
    CodedWeight,
    GroupedMLP,
    MasterWeights,
    MoE,
    expert_tensors,
    export_experts,
    load_experts,
    quantized_parameters,
)

FORWARD = {"dgrad": "high_precision", "wgrad": "high_precision"}
FP32_BLOCK = BlockScaling(power_of_two=False)
Draw = Callable[[np.random.Generator], Published]
HF, HF_POWERS = published.hugging_face, lambda rng: published.hugging_face(rng, power_of_two=True)
BLOCKS = lambda rng: published.compressed(rng, "block")  # noqa: E731
MINIMAX_SAYS = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]}
MINIMAX = lambda rng: replace(HF(rng), config=MINIMAX_SAYS)  # noqa: E731
CHANNELS = lambda rng: published.compressed(rng, "channel")  # noqa: E731
TENSORS = lambda rng: published.compressed(rng, "tensor")  # noqa: E731
MODELOPT_FP8 = lambda rng: replace(TENSORS(rng), config={"quant_method": "modelopt", "quant_algo": "FP8"})  # noqa: E731
MX_SQUARE = lambda rng: published.mxfp8(rng, square=True)  # noqa: E731
OSS, WIDE = published.gpt_oss, lambda rng: published.gpt_oss(rng, binades=15)
NV, SQUARE = published.modelopt, lambda rng: published.modelopt(rng, square=True)
TWO_FACTORS = lambda rng: published.modelopt(rng, one_factor=False)  # noqa: E731

EXACT: dict[str, tuple[Draw, Recipe]] = {
    "hf-fp8, block with fp32 scales": (HF, FP32_BLOCK),
    "hf-fp8 as MiniMax-M2 says it, block with fp32 scales": (MINIMAX, FP32_BLOCK),
    "hf-fp8 with powers of two, block": (HF_POWERS, BlockScaling()),
    "hf-fp8 with powers of two, mxfp8": (HF_POWERS, MXFP8()),
    "compressed blocks, block with fp32 scales": (BLOCKS, FP32_BLOCK),
    "compressed channels, row forward only": (CHANNELS, RowScaling(power_of_two=False, **FORWARD)),
    "compressed tensors, block with fp32 scales": (TENSORS, FP32_BLOCK),
    "modelopt fp8, block with fp32 scales": (MODELOPT_FP8, FP32_BLOCK),
    "compressed tensors, row forward only": (TENSORS, RowScaling(power_of_two=False, **FORWARD)),
    "compressed mxfp8, mxfp8 forward only": (published.mxfp8, MXFP8(**FORWARD)),
    "compressed mxfp8 with square blocks, mxfp8": (MX_SQUARE, MXFP8(square_weights=True)),
    "compressed mxfp4, block": (published.mxfp4, BlockScaling()),
    "gpt-oss, block": (OSS, BlockScaling()),
    "compressed mxfp4, mxfp4 weights": (published.mxfp4, MXFP4Weights()),
    "gpt-oss, mxfp4 weights": (OSS, MXFP4Weights()),
    "gpt-oss, mxfp8 forward only": (WIDE, MXFP8(**FORWARD)),
    "modelopt, nvfp4 forward only": (NV, NVFP4(square_weights=False, **FORWARD)),
    "modelopt with square blocks, nvfp4": (SQUARE, NVFP4()),
}
ROUNDED: dict[str, tuple[Draw, Recipe, str, str]] = {
    "hf-fp8, block": (HF, BlockScaling(), "rowwise", "scales are not powers of two"),
    "hf-fp8, current": (HF, CurrentScaling(), "rowwise", "several scales in a block of 256x256"),
    "compressed channels, row": (CHANNELS, RowScaling(power_of_two=False), "columnwise", "no scales along this"),
    "compressed channels, block": (CHANNELS, FP32_BLOCK, "rowwise", "several scales in a block of 128x128"),
    "compressed tensors, current": (TENSORS, CurrentScaling(), "rowwise", "several scales in a block of 256x256"),
    "gpt-oss of 16 binades, block": (WIDE, BlockScaling(), "rowwise", "E4M3 codes with a scale per 128x128 do not"),
    "gpt-oss of 16 binades, mxfp4 weights": (WIDE, MXFP4Weights(), "rowwise", "E4M3 codes with a scale per 128x128 do"),
    "compressed mxfp8, mxfp8": (published.mxfp8, MXFP8(), "columnwise", "no scales along this"),
    "modelopt, nvfp4": (NV, NVFP4(), "rowwise", "several scales in a block of 16x16"),
    "modelopt with two factors, nvfp4": (TWO_FACTORS, NVFP4(square_weights=False), "rowwise", "factors of their own"),
}


def mlp(recipe: Recipe | None, drawn: Published, **more: Any) -> GroupedMLP:
    """Experts like the file's, in bf16."""
    oss = drawn.config["quant_method"] == "mxfp4"
    facts: dict[str, Any] = {"activation": "clamped_swiglu", "bias": True} if oss else {}
    facts |= {"recipe": recipe, "dtype": torch.bfloat16, "backend": "torch-reference"}
    return GroupedMLP(E, K, F, K, **facts | more)


def model(experts: nn.Module) -> nn.Module:
    """`experts` under the path that the files have, without "model."."""
    layer = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})})
    return nn.ModuleDict({"layers": nn.ModuleList([layer])})


def loaded(drawn: Published, recipe: Recipe | None, folder: Path, **more: Any) -> tuple[GroupedMLP, dict[str, int]]:
    options = {name: more.pop(name) for name in ("exact", "weights", "device") if name in more}
    experts = mlp(recipe, drawn, **more)
    return experts, load_experts(model(experts), drawn.write(folder, shards=2), prefix="model.", **options)


def values_of(weight: Tensor, direction: Any) -> np.ndarray[Any, Any]:
    assert isinstance(weight, CodedWeight)
    return octavo_torch.dequantize(weight.codes, direction).numpy()


@pytest.mark.parametrize("which", EXACT)
def test_every_plane_has_the_files_values(which: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """By the formats' own definitions, in numpy, each expert's gate, up and down projection at its place."""
    draw, recipe = EXACT[which]
    drawn = draw(rng)
    experts, changed = loaded(drawn, recipe, tmp_path)
    assert changed == {}
    for weight, values in zip((experts.weight1, experts.weight2), drawn.weights(), strict=True):
        assert isinstance(weight, CodedWeight)
        assert weight.dtype is torch.bfloat16
        for direction in weight.codes.spec.quantizer.directions:
            np.testing.assert_array_equal(values_of(weight, direction), values)
    if drawn.biases:
        wanted = np.concatenate([drawn.biases["gate_proj"], drawn.biases["up_proj"]], 1)
        np.testing.assert_array_equal(experts.bias1.detach().float().numpy(), wanted)
        np.testing.assert_array_equal(experts.bias2.detach().float().numpy(), drawn.biases["down_proj"])


def test_codes_are_the_files_bytes(rng: np.random.Generator, tmp_path: Path) -> None:
    """Nothing is quantized again: a code that quantizing the values would not give stays as it is."""
    drawn = HF(rng)
    experts, _ = loaded(drawn, FP32_BLOCK, tmp_path)
    codes, scale, _ = experts.weight1.codes.plane("rowwise")
    for expert in range(E):
        for start, name in ((0, "gate_proj"), (F, "up_proj")):
            whole = f"{PATH}.{expert}.{name}"
            assert torch.equal(
                codes[expert, start : start + F].view(torch.uint8), drawn.tensors[f"{whole}.weight"].view(torch.uint8)
            )
            blocks = scale[expert, start // 128 : (start + F) // 128]
            assert torch.equal(blocks, drawn.tensors[f"{whole}.weight_scale_inv"])


@pytest.mark.parametrize("which", ROUNDED)
def test_what_a_recipe_does_not_hold_is_refused_or_counted(
    which: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    """With the plane and the reason; exact=False rounds, says how many elements differ, and is right about it."""
    draw, recipe, plane, reason = ROUNDED[which]
    drawn = draw(rng)
    with pytest.raises(ValueError, match=rf"layers\.0\.mlp\.experts\.weight1\.{plane} does not hold .*{reason}"):
        loaded(drawn, recipe, tmp_path)
    experts, changed = loaded(drawn, recipe, tmp_path, exact=False)
    for weight, name, values in zip(
        (experts.weight1, experts.weight2), ("weight1", "weight2"), drawn.weights(), strict=True
    ):
        shared = recipe.quantizer("w").shares_codes  # type: ignore[union-attr]
        for direction in ("rowwise",) if shared else ("rowwise", "columnwise"):
            counted = changed.get(f"layers.0.mlp.experts.{name}.{direction}", 0)
            assert counted == (values_of(weight, direction) != values).sum()
    assert f"layers.0.mlp.experts.weight1.{plane}" in changed


def test_values_where_codes_do_not_fit(rng: np.random.Generator, tmp_path: Path) -> None:
    """bf16 holds every MXFP4 value, whatever its exponents; FP8 with fp32 scales is refused, or rounded on request."""
    drawn = WIDE(rng)
    experts, changed = loaded(drawn, None, tmp_path, weights="values", interleave=1)
    assert changed == {}
    gate_first, down = drawn.weights()
    in_turns = np.stack([gate_first[:, :F], gate_first[:, F:]], 2).reshape(gate_first.shape)  # as the module says
    np.testing.assert_array_equal(experts.weight1.detach().float().numpy(), in_turns)
    np.testing.assert_array_equal(experts.weight2.detach().float().numpy(), down)
    drawn = HF(rng)
    with pytest.raises(ValueError, match=r"bfloat16 is shorter than .* with dtype=torch\.float32, which holds them"):
        loaded(drawn, None, tmp_path, weights="values")
    experts, changed = loaded(drawn, None, tmp_path, weights="values", exact=False)
    assert torch.equal(experts.weight2.detach(), torch.from_numpy(drawn.weights()[1]).bfloat16())
    assert set(changed) == {f"layers.0.mlp.experts.weight{number}" for number in (1, 2)}


@pytest.mark.parametrize("interleave", [None, 1, 32])
def test_the_modules_order_of_gate_and_up(interleave: int | None, rng: np.random.Generator, tmp_path: Path) -> None:
    """Biases and codes are in the order that the module computes in: y is that of the file's values, in that order."""
    drawn = OSS(rng)
    experts, _ = loaded(drawn, BlockScaling(), tmp_path, interleave=interleave)
    valued = mlp(BlockScaling(), drawn)
    names = {"weight1": drawn.weights()[0], "weight2": drawn.weights()[1]}
    names |= {"bias1": np.concatenate([drawn.biases["gate_proj"], drawn.biases["up_proj"]], 1)}
    names |= {"bias2": drawn.biases["down_proj"]}
    valued.load_state_dict({name: torch.from_numpy(value) for name, value in names.items()})
    x = torch.randn(9, K).bfloat16()
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    results = [module(leaf, [4, 0, 5]) for module, leaf in zip((experts, valued), leaves, strict=True)]
    for y in results:
        y.float().square().sum().backward()
    assert torch.equal(*results)
    assert torch.equal(leaves[0].grad, leaves[1].grad)  # type: ignore[arg-type]


EXPORTS: dict[str, tuple[Draw, Recipe, str]] = {
    "hf-fp8": (HF, FP32_BLOCK, "hf-fp8"),
    "blocks": (BLOCKS, FP32_BLOCK, "compressed-tensors"),
    "channels": (CHANNELS, RowScaling(power_of_two=False, **FORWARD), "compressed-tensors"),
    "mxfp8": (published.mxfp8, MXFP8(**FORWARD), "compressed-tensors"),
    "mxfp8, square": (MX_SQUARE, MXFP8(square_weights=True), "compressed-tensors"),
    "mxfp4": (published.mxfp4, BlockScaling(), "compressed-tensors-mxfp4"),
    "mxfp4, mxfp4 weights": (published.mxfp4, MXFP4Weights(), "compressed-tensors-mxfp4"),
    "gpt-oss, mxfp4 weights": (OSS, MXFP4Weights(), "gpt-oss-mxfp4"),
    "modelopt": (NV, NVFP4(square_weights=False, **FORWARD), "modelopt-nvfp4"),
    "modelopt, square": (SQUARE, NVFP4(), "modelopt-nvfp4"),
    "gpt-oss": (OSS, BlockScaling(), "gpt-oss-mxfp4"),
}


@pytest.mark.parametrize("which", EXPORTS)
def test_what_was_loaded_is_exported_again(which: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """The same tensors, in files of the size that is asked for, with config.json, fingerprint and other tensors."""
    draw, recipe, layout = EXPORTS[which]
    drawn = draw(rng)
    experts, _ = loaded(drawn, recipe, tmp_path)
    whole, out = model(experts), tmp_path / "out"
    others = {"model.embed_tokens.weight": torch.randn(8, K), "model.norm.weight": torch.ones(K)}
    export_experts(
        whole, out, layout, prefix="model.", others=others, config={"model_type": "some"}, shard_bytes=60_000
    )  # type: ignore[arg-type]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert set(index["weight_map"].values()) == set(files)
    written = {name: value for file in files for name, value in load_file(str(out / file)).items()}
    assert {name: index["weight_map"][name] for name in written} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in written.values())
    for name, value in others.items():
        assert torch.equal(written.pop(name), value)
    wanted = {name: value for name, value in drawn.tensors.items() if not name.endswith("input_scale")}
    assert written.keys() == wanted.keys()
    if "mxfp4" not in layout:  # one value has several codes there
        assert all(torch.equal(as_bytes(written[name]), as_bytes(value)) for name, value in wanted.items())
    with safe_open(str(out / files[0]), framework="pt") as file:
        facts = json.loads(file.metadata()["octavo_experts"])
    assert facts["recipes"]["layers.0.mlp.experts"]["fingerprint"] == recipe.fingerprint
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "some"
    assert config["quantization_config"]["quant_method"] == drawn.config["quant_method"]
    assert "model.embed_tokens" in json.dumps(config["quantization_config"])  # is not quantized
    again = mlp(recipe, drawn)
    assert load_experts(model(again), out, prefix="model.") == {}
    for one, other in ((experts.weight1, again.weight1), (experts.weight2, again.weight2)):
        assert all(map(torch.equal, planes(one), planes(other)))


def as_bytes(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)


def test_an_engine_is_refitted_tensor_by_tensor(rng: np.random.Generator, tmp_path: Path) -> None:
    """The pairs are those of the files, in memory of their own, and follow the optimizer's steps."""
    drawn = HF_POWERS(rng)
    experts, _ = loaded(drawn, BlockScaling(), tmp_path)
    before = dict(expert_tensors(experts, "hf-fp8", prefix="model.layers.0.mlp."))
    assert before.keys() == drawn.tensors.keys()
    assert all(torch.equal(as_bytes(before[name]), as_bytes(value)) for name, value in drawn.tensors.items())
    masters = MasterWeights(experts)
    optimizer = torch.optim.SGD(masters.all_parameters(), lr=0.1)
    masters.follow(optimizer)
    experts(torch.randn(6, K).bfloat16(), [2, 2, 2]).float().square().mean().backward()
    optimizer.step()
    after = dict(expert_tensors(experts, "hf-fp8", prefix="model.layers.0.mlp."))
    assert any(not torch.equal(as_bytes(before[name]), as_bytes(value)) for name, value in after.items())
    assert all(torch.equal(as_bytes(before[name]), as_bytes(value)) for name, value in drawn.tensors.items())
    up = after[f"{PATH}.1.up_proj.weight"].float() * after[f"{PATH}.1.up_proj.weight_scale_inv"].repeat_interleave(
        128, 1
    )
    assert torch.equal(up, octavo_torch.dequantize(experts.weight1.codes)[1, F:])


@pytest.mark.parametrize(
    "recipe", [CurrentScaling(), DelayedScaling(), BlockScaling(), RowScaling()], ids=lambda one: one.kind
)
def test_weights_of_values_are_exported_as_the_forward_reads_them(
    recipe: Recipe, rng: np.random.Generator, tmp_path: Path
) -> None:
    """One scale per expert becomes one per projection, with the same codes: quantize(weight) in another layout."""
    experts = MoE(E, K, F, 2, recipe=recipe, dtype=torch.bfloat16, interleave=32, backend="torch-reference")
    scale = experts.delayed_states[0].encode_scale("w") if recipe.stateful else None
    halves = experts.weight1.detach().reshape(E, -1, 2, 32, K).transpose(1, 2).reshape(E, 2 * F, K)
    spec = recipe.quantizer("w")
    assert spec is not None
    values = octavo_torch.dequantize(octavo_torch.quantize(halves, spec, scale=scale))
    pairs = dict(expert_tensors(experts, "compressed-tensors", names=("w1", "w3", "w2"), first=4))
    for expert in range(E):
        for name, rows in (("w1", slice(0, F)), ("w3", slice(F, 2 * F))):
            weight, scale = (pairs[f"experts.{4 + expert}.{name}.{kind}"] for kind in ("weight", "weight_scale"))
            rows_of = 128 if recipe.kind == "block" else 1
            wide = scale.repeat_interleave(rows_of, 0).repeat_interleave(128, 1) if scale.dim() == 2 else scale
            wide = wide if wide.dim() == 1 or recipe.kind == "block" else wide[:, :1]
            assert torch.equal(weight.float() * wide, values[expert, rows])


def test_a_rank_loads_its_own_experts(rng: np.random.Generator, tmp_path: Path) -> None:
    """By number, from either kind of file, and writes them under the model's numbers."""
    for draw, recipe, layout in ((HF, FP32_BLOCK, "hf-fp8"), (OSS, BlockScaling(), None)):
        drawn = draw(rng)
        folder = drawn.write(tmp_path)
        facts = {"activation": "clamped_swiglu", "bias": True} if layout is None else {}
        rank = GroupedMLP(2, K, F, K, recipe=recipe, dtype=torch.bfloat16, backend="torch-reference", **facts)
        load_experts(model(rank), folder, prefix="model.", experts=(1, 2))
        np.testing.assert_array_equal(values_of(rank.weight2, "rowwise"), drawn.weights()[1][1:])
        if layout is not None:
            pairs = dict(expert_tensors(model(rank), layout, prefix="model.", first=1))  # type: ignore[arg-type]
            assert pairs.keys() == {name for name in drawn.tensors if not name.startswith(f"{PATH}.0.")}


@pytest.mark.parametrize("weights", ["values", "codes"])
def test_parameters_that_fit_stay_the_same(weights: Any, rng: np.random.Generator, tmp_path: Path) -> None:
    """Values go into values and codes into codes, biases too: an optimizer that was created before trains them."""
    drawn = published.gpt_oss(rng)
    wanted, _ = loaded(drawn, BlockScaling(), tmp_path, weights=weights)
    with quantized_parameters(BlockScaling()) if weights == "codes" else nullcontext():
        experts = mlp(BlockScaling(), drawn)
    before, optimizer = [*experts.parameters()], octavo_torch.AdamW(experts.parameters(), lr=0.1)
    load_experts(model(experts), tmp_path, prefix="model.", weights=weights)
    assert all(one is other for one, other in zip(before, experts.parameters(), strict=True))
    x = torch.randn(12, K, dtype=torch.bfloat16)
    sizes = [12, *[0] * (E - 1)]
    assert torch.equal(experts(x, sizes), wanted(x, sizes))
    experts(x, sizes).sum().backward()
    with pytest.raises(ValueError, match="was changed after this optimizer had written it"):
        optimizer.step()


def test_a_module_without_memory_is_filled(rng: np.random.Generator, tmp_path: Path) -> None:
    """From the meta device to the one that is given; gradients stay asked for as they were."""
    drawn = OSS(rng)
    experts = mlp(BlockScaling(), drawn, device="meta")
    experts.weight2.requires_grad_(False)
    folder = drawn.write(tmp_path)
    with pytest.raises(ValueError, match=r"device is None and layers\.0\.mlp\.experts is on the meta device; give"):
        load_experts(model(experts), folder, prefix="model.")
    load_experts(model(experts), folder, prefix="model.", device="cpu")
    assert all(parameter.device.type == "cpu" for parameter in experts.parameters())
    assert [one.requires_grad for one in (experts.weight1, experts.weight2, experts.bias1)] == [True, False, True]
    assert experts(torch.randn(3, K).bfloat16(), [1, 1, 1]).isfinite().all()


def test_experts_without_a_gate_and_uneven_sides(rng: np.random.Generator, tmp_path: Path) -> None:
    """Two projections, and sides that blocks of 128 do not divide: the last block of a side is smaller."""
    sides = {"up_proj": (72, 200), "down_proj": (200, 72)}
    tensors, values = {}, {}
    for name, shape in sides.items():
        codes = published.e4m3(rng, shape)
        grid = tuple(-(-side // 128) for side in shape)
        scale = published.fp8_scales(rng, grid, power_of_two=False)
        tensors[f"experts.0.{name}.weight"] = published.of_fp8(codes)
        tensors[f"experts.0.{name}.weight_scale_inv"] = torch.from_numpy(scale).to(torch.bfloat16)
        wide = published.spread(tensors[f"experts.0.{name}.weight_scale_inv"].float().numpy(), 128, 128, shape)
        values[name] = published.decode(codes, "e4m3") * wide
    drawn = Published({"quant_method": "fp8", "weight_block_size": [128, 128]}, tensors)
    experts = GroupedMLP(1, 200, 72, activation="relu2", recipe=FP32_BLOCK, backend="torch-reference")
    load_experts(experts, drawn.write(tmp_path))
    np.testing.assert_array_equal(values_of(experts.weight1, "columnwise")[0], values["up_proj"])
    np.testing.assert_array_equal(values_of(experts.weight2, "rowwise")[0], values["down_proj"])
    with pytest.raises(ValueError, match=r"experts\.0\.up_proj is \[72, 200\], and readers of hf-fp8 agree on"):
        dict(expert_tensors(experts, "hf-fp8"))
    pairs = dict(expert_tensors(experts, "compressed-tensors"))
    assert torch.equal(
        pairs["experts.0.up_proj.weight_scale"].bfloat16(), tensors["experts.0.up_proj.weight_scale_inv"]
    )


def test_gate_and_up_that_share_a_block_with_two_scales(rng: np.random.Generator, tmp_path: Path) -> None:
    """64 rows each lie in one block of the fused weight: exact only where both have the same scale."""
    shapes = {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}
    scales = {"gate_proj": 1.0, "up_proj": 1.0, "down_proj": 0.5}
    experts = GroupedMLP(1, 128, 64, recipe=BlockScaling(), backend="torch-reference")

    def made() -> Path:
        tensors = {}
        for name, shape in shapes.items():
            tensors[f"experts.0.{name}.weight"] = published.of_fp8(published.e4m3(rng, shape))
            tensors[f"experts.0.{name}.weight_scale_inv"] = torch.full((1, 1), scales[name])
        return Published({"quant_method": "fp8", "weight_block_size": [128, 128]}, tensors).write(tmp_path)

    assert load_experts(experts, made()) == {}
    scales["up_proj"] = 0.25
    with pytest.raises(ValueError, match=r"weight1\.rowwise does not hold .* several scales in a block of 128x128"):
        load_experts(experts, made())
