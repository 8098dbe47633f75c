"""Damaged, hostile and mismatched files: each is refused with name and reason before any weight is replaced."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import published
import pytest
import torch
from published import PATH, E, F, K, Published
from torch import Tensor, nn
from torch.nn.utils import prune

from octavo import BlockScaling, DelayedScaling, HighPrecision
from octavo_torch import GroupedMLP, expert_tensors, export_experts, load_checkpoint, load_experts

UP = f"{PATH}.1.up_proj"
BLOCKS, SCALES = f"{PATH}.gate_up_proj_blocks", f"{PATH}.gate_up_proj_scales"
Drawn = dict[str, Published]


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    """One file of each layout, which no test changes."""
    rng = np.random.default_rng(7)
    torch.manual_seed(7)
    made = {
        "hf": published.hugging_face(rng, power_of_two=True),
        "channels": published.compressed(rng, "channel"),
        "oss": published.gpt_oss(rng),
        "mx4": published.mxfp4(rng),
        "nv": published.modelopt(rng, square=True),
    }
    return made


def experts(layout: str = "hf", **more: Any) -> GroupedMLP:
    facts: dict[str, Any] = {"recipe": BlockScaling(), "backend": "torch-reference", "dtype": torch.bfloat16}
    if layout == "oss":
        facts |= {"activation": "clamped_swiglu", "bias": True}
    if layout == "nv":
        facts["recipe"] = "nvfp4"
    return GroupedMLP(E, K, F, K, **facts | more)


def refused(module: GroupedMLP, folder: Path, message: str, **more: Any) -> None:
    """The message, in one line; and every parameter is the object with the bits that it was."""
    before = {name: (value, value.detach().clone()) for name, value in module.named_parameters()}
    whole = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"experts": module})})])})
    with pytest.raises(ValueError, match=message) as told:
        load_experts(whole, folder, **{"prefix": "model."} | more)
    assert "\n" not in str(told.value)
    assert {name: value for name, (value, _) in before.items()}.keys() == dict(module.named_parameters()).keys()
    for name, value in module.named_parameters():
        assert value is before[name][0]
        assert torch.equal(value, before[name][1])


def with_tensor(name: str, value: Tensor | Callable[[Tensor], Tensor] | None) -> Callable[[dict[str, Tensor]], None]:
    """Replaces or changes a tensor; None takes it away."""

    def change(tensors: dict[str, Tensor]) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value if isinstance(value, Tensor) else value(tensors[name].clone())

    return change


def element(index: Any, number: float) -> Callable[[Tensor], Tensor]:
    def changed(value: Tensor) -> Tensor:
        raw = value.view(torch.uint8) if value.element_size() == 1 else value
        raw[index] = number
        return value

    return changed


INVERSE = f"{UP}.weight_scale_inv"
TENSORS: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], str]] = {
    "zero scale": ("hf", with_tensor(INVERSE, element((0, 1), 0)), r"1\.up_proj\.weight_scale_inv\[0, 1\] is 0\.0"),
    "negative scale": ("hf", with_tensor(INVERSE, element((0, 0), -1)), r"weight_scale_inv\[0, 0\] is -1\.0"),
    "NaN scale": ("hf", with_tensor(INVERSE, element((0, 0), torch.nan)), r"weight_scale_inv\[0, 0\] is nan"),
    "infinite scale": ("hf", with_tensor(INVERSE, element((0, 0), torch.inf)), r"weight_scale_inv\[0, 0\] is inf"),
    "scale past fp32": ("hf", with_tensor(INVERSE, element((0, 0), 1e37)), r"\[0, 0\] is .*e\+3\d .* past what"),
    "NaN code": ("hf", with_tensor(f"{UP}.weight", element((3, 5), 0xFF)), r"up_proj\.weight\[3, 5\] is NaN in"),
    "shape of scales": ("hf", with_tensor(INVERSE, torch.ones(2, 1)), r"has shape \[2, 1\] in .* need \[1, 2\]"),
    "dtype of scales": ("hf", with_tensor(INVERSE, torch.ones(1, 2).int()), r"int32 \[1, 2\] in the file; give scales"),
    "dtype of codes": ("hf", with_tensor(f"{UP}.weight", torch.ones(F, K)), r"up_proj\.weight is float32 \[128, 256\]"),
    "axes of codes": (
        "hf", with_tensor(f"{UP}.weight", lambda value: value[None]), r"weight is float8_e4m3fn \[1, 128, 256\]"
    ),
    "sides": (
        "hf", with_tensor(f"{UP}.weight", lambda value: value[:, :200]), r"1\.up_proj is \[128, 200\] in the file"
    ),
    "no scales": ("hf", with_tensor(INVERSE, None), r"1\.up_proj\.weight_scale_inv' is missing"),
    "no expert": (
        "hf", lambda tensors: [tensors.pop(name) for name in [*tensors] if ".1." in name] and None, "and not 1; give"
    ),
    "one expert more": (
        "hf",
        lambda tensors: tensors.update({n.replace(".1.", ".3."): t.clone() for n, t in tensors.items() if ".1." in n}),
        r"has 4 experts to load and the module 3",
    ),
    "unknown kind": ("hf", with_tensor(f"{UP}.zero_point", torch.ones(1)), r"up_proj\.zero_point' is unknown in files"),
    "unknown projection": (
        "hf", with_tensor(f"{PATH}.1.side_proj.weight", torch.ones(1)), r"1\.side_proj\.weight' is not in every expert"
    ),
    "number too long": (
        "hf", with_tensor(f"{PATH}.{'9' * 5000}.up_proj.weight", torch.ones(1)), r"9\.\.\. is unknown in files"
    ),
    "a bias alone": ("hf", with_tensor(f"{UP}.bias", torch.ones(F)), r"1\.up_proj\.bias' is not in every expert"),
    "another layout": (
        "hf",
        lambda tensors: [tensors.pop(name) for name in [*tensors] if name.endswith("_inv")] and None,
        r"are of no known layout \(hf-fp8, compressed-tensors, .*, gpt-oss-mxfp4, modelopt-nvfp4\)",
    ),
    "channels that are none": (
        "channels", with_tensor(f"{UP}.weight_scale", torch.ones(F, 2)), r"up_proj\.weight_scale .*\[128, 2\]"
    ),
    "packed scales of fewer blocks": (
        "mx4", with_tensor(f"{UP}.weight_scale", lambda value: value[:, 1:]), r"uint8 \[128, 7\] in the file; give a"
    ),
    "packed NaN": ("mx4", with_tensor(f"{UP}.weight_scale", element((2, 3), 0xFF)), r"weight_scale\[2, 3\] is 255"),
    "E8M0 NaN": ("oss", with_tensor(SCALES, element((1, 2, 3), 0xFF)), r"gate_up_proj_scales\[2, 3\] is 255"),
    "E8M0 past fp32": ("oss", with_tensor(SCALES, element((1, 2, 3), 0xFE)), r"\[2, 3\] is 1\.7.*e\+38 .* past what"),
    "blocks of 15 bytes": (
        "oss", with_tensor(BLOCKS, lambda value: value[..., :15]), r"uint8 \[256, 8, 15\] in the file; give 16"
    ),
    "scales of fewer blocks": ("oss", with_tensor(SCALES, lambda value: value[:, 1:]), r"give uint8 \[256, 8\]"),
    "fewer experts": ("oss", with_tensor(SCALES, lambda value: value[1:]), r"tensors of \[\(2,\), \(3,\)\] experts"),
    "a bias missing": ("oss", with_tensor(f"{PATH}.down_proj_bias", None), r"down_proj_bias' is missing"),
    "infinite bias": (
        "oss", with_tensor(f"{PATH}.down_proj_bias", element((0, 1), torch.inf)), r"bias of .*down_proj is not finite"
    ),
    "bias of another length": (
        "oss", with_tensor(f"{PATH}.down_proj_bias", torch.ones(E, 3)), r"bias of .*down_proj is .*\[3\] in the file"
    ),
    "NaN second-level factor": (
        "nv", with_tensor(f"{UP}.weight_scale_2", torch.tensor(torch.nan)), r"weight_scale_2 is nan"
    ),
    "factor of rows": ("nv", with_tensor(f"{UP}.weight_scale_2", torch.ones(F)), r"float32 \[128\] in the file"),
    "negative block scale": (
        "nv", with_tensor(f"{UP}.weight_scale", element((4, 4), 0xB8)), r"up_proj\.weight_scale\[4, 4\] is -1\.0"
    ),
    "scales of 32": (
        "nv", with_tensor(f"{UP}.weight_scale", lambda value: value[:, ::2]), r"give float8_e4m3fn \[128, 16\]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", TENSORS)
def test_a_wrong_tensor_is_named(which: str, drawn: Drawn, tmp_path: Path) -> None:
    """Name, index and value, or shape and dtype, and what is needed (faults.md 58)."""
    layout, change, message = TENSORS[which]
    tensors = dict(drawn[layout].tensors)
    change(tensors)
    refused(experts(layout), Published(drawn[layout].config, tensors).write(tmp_path), message)


def weights(**changed: Any) -> dict[str, Any]:
    """The entry of a group whose weights differ in something from eight-bit floats per channel."""
    said = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", **changed}
    return {"config_groups": {"a": {"weights": said}}}


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "method": ("hf", {"quant_method": "mxfp4"}, r"quant_method 'mxfp4', and files of this layout have 'fp8'"),
    "block": ("hf", {"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\], and files of this .*\[128, 128\]"),
    "no blocks": ("hf", {"weight_block_size": None}, r"weight_block_size None"),
    "E5M2": ("hf", {"fmt": "e5m2"}, r"fmt 'e5m2'"),
    "INT8": ("channels", {"format": "int-quantized"}, r"format 'int-quantized'"),
    "not compressed": ("channels", {"quantization_status": "frozen"}, r"quantization_status 'frozen'"),
    "groups": ("channels", {"config_groups": 3}, r"config_groups 3; give"),
    "group without weights": ("channels", {"config_groups": {"a": {}}}, r"has a group without weights"),
    "scales in another format": ("hf", {"scale_fmt": "e5m3"}, r"scale_fmt 'e5m3'"),
    "experts of 4 bits": ("hf", {"expert_dtype": "fp4"}, r"expert_dtype 'fp4'"),
    "4 bits": ("channels", weights(num_bits=4), r"num_bits 4"),
    "integers": ("channels", weights(type="int"), r"type 'int'"),
    "zero points": ("channels", weights(symmetric=False), r"symmetric False"),
    "scales of tokens": ("channels", weights(strategy="token"), r"strategy 'token'"),
    "blocks of 64": ("channels", weights(strategy="block", block_structure=[64, 64]), r"block_structure \[64, 64\]"),
    "groups of another format": (
        "channels",
        {**weights(strategy="group", group_size=32), "format": "float-quantized"},
        r"format 'float-quan",
    ),
    "packed, not compressed": ("mx4", {"quantization_status": "frozen"}, r"quantization_status 'frozen'"),
    "group of 32": ("nv", {"group_size": 32}, r"group_size 32"),
    "another packing": ("mx4", {"format": "nvfp4-pack-quantized"}, r"format 'nvfp4-pack-quantized'"),
    "group of channels": ("channels", weights(strategy="group", group_size=64), r"group_size 64"),
    "algorithm": ("nv", {"quant_algo": "W4A8"}, r"quant_algo 'W4A8'"),
}


@pytest.mark.parametrize("which", CONFIGS)
def test_a_config_of_another_layout_is_refused(which: str, drawn: Drawn, tmp_path: Path) -> None:
    """What config.json says of the quantization has to be what the tensors are."""
    layout, change, message = CONFIGS[which]
    config = {**drawn[layout].config, **change}
    refused(experts(layout), Published(config, drawn[layout].tensors).write(tmp_path), message)


def index(folder: Path, **changed: Any) -> None:
    file = folder / "model.safetensors.index.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "weight_map": {**content["weight_map"], **changed}}))


def damage(folder: Path, how: str) -> None:
    """Damages a folder of two files."""
    first, second = sorted(folder.glob("*.safetensors"))
    listing = folder / "model.safetensors.index.json"
    names = json.loads(listing.read_text())["weight_map"]
    whole = first.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")

    def rewritten(content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        first.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])

    if how == "truncated":
        first.write_bytes(whole[:-1])
    elif how == "empty":
        first.write_bytes(b"")
    elif how == "header of 2^63 bytes":
        first.write_bytes(struct.pack("<Q", 1 << 63) + whole[8:])
    elif how == "offsets past the end":
        rewritten({**header, name: {**header[name], "data_offsets": [0, 1 << 60]}})
    elif how == "overlap":
        rewritten({**header, name: {**header[name], "data_offsets": [0, 5]}})
    elif how == "pickle":
        torch.save({"a": torch.ones(1)}, first)
    elif how == "shard missing":
        second.unlink()
    elif how == "swapped":
        shutil.copy(first, second)
    elif how == "index of numbers":
        index(folder, **{next(iter(names)): 3})
    elif how == "parent folder":
        shutil.copy(first, folder.parent / "outside.safetensors")
        index(folder, **{next(iter(names)): "../outside.safetensors"})
    elif how == "absolute path":
        index(folder, **{next(iter(names)): str(first)})
    elif how == "no weight_map":
        listing.write_text("{}")
    elif how == "not JSON":
        listing.write_text("{")
    elif how == "nested":
        listing.write_text("[" * 100_000)
    elif how == "a number of 10 000 digits":
        listing.write_text('{"weight_map": ' + "9" * 10_000 + "}")
    elif how == "twice":
        listing.write_text('{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}')
    elif how == "config":
        (folder / "config.json").write_text("[]")
    elif how == "config of a number":
        (folder / "config.json").write_text('{"quantization_config": 3}')
    elif how == "later version":
        rewritten({**header, "__metadata__": {"octavo_experts": '{"version": 2}'}})
    elif how == "metadata":
        rewritten({**header, "__metadata__": {"octavo_experts": "?"}})
    elif how == "nothing":
        shutil.rmtree(folder)


DAMAGES = {
    "truncated": r"00001-of-00002\.safetensors is not a complete safetensors file",
    "empty": r"00001-of-00002\.safetensors is not a complete safetensors file",
    "header of 2^63 bytes": "is not a complete safetensors file",
    "offsets past the end": "is not a complete safetensors file",
    "overlap": "is not a complete safetensors file",
    "pickle": "is not a complete safetensors file",
    "shard missing": r"00002-of-00002\.safetensors is missing, which model\.safetensors\.index\.json has tensors in",
    "swapped": r"00002-of-00002\.safetensors lacks '.*', which model\.safetensors\.index\.json says it has",
    "index of numbers": r"index\.json has .* in 3, which names no safetensors file",
    "parent folder": r"in '\.\./outside\.safetensors', which names no safetensors file",
    "absolute path": r"which names no safetensors file",
    "no weight_map": r"index\.json has no weight_map",
    "not JSON": r"index\.json cannot be read as JSON",
    "nested": r"index\.json cannot be read as JSON",
    "a number of 10 000 digits": r"index\.json cannot be read as JSON",
    "twice": r"'a' stands twice in one object",
    "config": r"config\.json is not a JSON object",
    "config of a number": r"config\.json has quantization_config 3, which is not an object",
    "later version": r"has version 2 of Octavo's experts and this octavo-torch reads 1",
    "metadata": r"metadata 'octavo_experts' of .* cannot be read",
    "nothing": r"model is not a complete safetensors file: No such file",
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_folder_is_refused(how: str, drawn: Drawn, tmp_path: Path) -> None:
    """Nothing outside of the folder is opened, nothing is unpickled, and no parser's own error gets out."""
    folder = tmp_path / "model"
    folder.mkdir()
    drawn["hf"].write(folder, shards=2)
    damage(folder, how)
    refused(experts(), folder, DAMAGES[how])


def sentence(module: GroupedMLP, folder: Path) -> str | None:
    """What loading is refused with; None where it works."""
    try:
        load_experts(module, folder, prefix=PATH)
    except ValueError as error:
        return str(error)
    return None


def test_any_byte_of_a_header_may_be_wrong(drawn: Drawn, rng: np.random.Generator, tmp_path: Path) -> None:
    """A header with changed bytes is refused in one line, or is still a file of these experts; nothing else happens."""
    small = Published(drawn["oss"].config, drawn["oss"].tensors).write(tmp_path)
    file = next(small.glob("*.safetensors"))
    whole = bytearray(file.read_bytes())
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    module = experts("oss")
    told = 0
    for _ in range(60):
        changed = bytearray(whole)
        for _ in range(rng.integers(1, 3)):
            changed[rng.integers(0, length)] = rng.integers(0, 256)
        file.write_bytes(changed)
        said = sentence(module, small)
        told += said is not None
        assert "\n" not in (said or "")
    assert told > 40


def test_modules_that_the_file_does_not_fit(drawn: Drawn, tmp_path: Path) -> None:
    """What is wrong with the module, or with the call, and what to give."""
    folder = drawn["hf"].write(tmp_path)
    refused(experts(), folder, r"has no tensors under 'layers\.0\.mlp\.experts'; give the prefix", prefix="")
    refused(
        experts(activation="relu2"), folder, r"projections gate_proj, up_proj, down_proj and the module's activation"
    )
    refused(experts(bias=True), folder, r"weight1 has no bias in the file and a bias in the module")
    refused(experts(recipe=DelayedScaling()), folder, r"is delayed, which takes its scales from earlier steps; create")
    refused(experts(recipe=HighPrecision()), folder, r"is high_precision, which reads values in fprop; create")
    refused(
        experts(per_group_parameters=True),
        folder,
        r"weight1 is one parameter per group; create the module with per_group",
    )
    for name in ("weight1", "bias1"):
        pruned = experts(bias=True)
        prune.identity(pruned, name)  # type: ignore[no-untyped-call]
        refused(pruned, folder, rf"{name} is not a parameter of its module: .*; remove that first")
    refused(experts(), folder, r"have weights .*; names is \('a', 'b', 'c'\)", names=("a", "b", "c"))
    refused(experts(), folder, r"and not 7; give", experts=(0, 1, 7))
    refused(experts(), folder, r"has 2 experts to load and the module 3", experts=(0, 1))
    with pytest.raises(ValueError, match="module has no GroupedMLP and no MoE"):
        load_experts(nn.Linear(2, 2), folder)
    wide = drawn["oss"].tensors[f"{PATH}.down_proj_bias"].float() * (1 + 2**-12)
    tensors = {**drawn["oss"].tensors, f"{PATH}.down_proj_bias": wide}
    other = tmp_path / "oss"
    other.mkdir()
    refused(
        experts("oss"), Published(drawn["oss"].config, tensors).write(other), r"bias of .*weight2 is float32 in the"
    )
    refused(experts(activation="relu2", bias=True), other, r"layout gpt-oss-mxfp4, whose experts have gates")


def test_exports_that_cannot_be_made(drawn: Drawn, tmp_path: Path, rng: np.random.Generator) -> None:
    """Recipes that a layout does not hold, values that MXFP4 does not have, and folders with a model in them."""
    module = experts()
    for layout, recipe, needed in (
        ("modelopt-nvfp4", BlockScaling(), "NVFP4's codes and scales"),
        ("hf-fp8", "mxfp8", "E4M3 codes with fp32 scales of 128x128 blocks"),
        ("hf-fp8", None, "weights that are quantized; write its values with octavo_torch.unstack_experts"),
        ("compressed-tensors", BlockScaling(forward_format="e5m2"), "E4M3 codes"),
    ):
        with pytest.raises(ValueError, match=f"layout {layout} holds {needed}"):
            expert_tensors(experts(recipe=recipe), layout)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"gate_up_proj has \d+ of 65536 values that MXFP4 does not hold"):
        export_experts(module, tmp_path / "a", "gpt-oss-mxfp4")
    assert not list((tmp_path / "a").iterdir())  # nothing half written
    folder = tmp_path / "b"
    export_experts(module, folder, "hf-fp8")
    with pytest.raises(ValueError, match=r"folder has .*, which would be replaced; give a new or empty folder"):
        export_experts(module, folder, "hf-fp8")
    clash = {"experts.0.gate_proj.weight": torch.ones(1)}
    with pytest.raises(
        ValueError, match=r"others has 'experts\.0\.gate_proj\.weight', which is a tensor of the experts"
    ):
        export_experts(module, tmp_path / "c", "hf-fp8", others=clash)
    with pytest.raises(ValueError, match="config is not JSON"):
        export_experts(module, tmp_path / "d", "hf-fp8", config={"a": print})
    both = nn.ModuleList([experts(), experts(recipe=BlockScaling(power_of_two=False))])
    with pytest.raises(ValueError, match="module has experts of several recipes"):
        expert_tensors(both, "hf-fp8")


@pytest.mark.parametrize("load", [load_experts, load_checkpoint])
def test_a_name_with_a_line_break_is_told_in_one_line(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with the file: here it is too short."""
    monkeypatch.chdir(tmp_path)  # messages shorten long names, as that of a temporary folder may be
    file = Path("\nmodel")
    file.write_bytes(b"no")
    with pytest.raises(ValueError, match=r"\\nmodel.* is not a complete safetensors file") as told:
        load(GroupedMLP(2, 16, 32, recipe=BlockScaling()), file)
    assert "\n" not in str(told.value)


def test_a_file_with_a_line_break_that_is_missing_is_told_in_one_line() -> None:
    """The system's own error quotes the name, too."""
    with pytest.raises(ValueError, match="No such file") as told:
        load_experts(GroupedMLP(2, 16, 32, recipe=BlockScaling()), Path("\nmodel"))
    assert "\n" not in str(told.value)
