"""What an export's config.json says of the weights: other libraries read the tensors by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import MXFP8, NVFP4, BlockScaling, CurrentScaling, MXFP4Weights, Recipe, RowScaling
from octavo_torch import GroupedMLP, export_experts

Config = dict[str, Any]
BYTES = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}


def numbers(bits: int, dynamic: bool, **more: Any) -> Config:
    """Signed floating-point numbers of this many bits, in compressed-tensors' words."""
    return {"num_bits": bits, "type": "float", "symmetric": True, "dynamic": dynamic, **more}


def compressed(form: str, **operands: Config) -> Config:
    """The config of compressed-tensors, whose single group has every Linear."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **operands}},
        "ignore": [],
    }


def eight_bits(weights: Config, activations: Config, form: str = "float-quantized") -> Config:
    """Weights and activations of 8 bits, the latter quantized by whoever computes with them."""
    return compressed(form, weights=numbers(8, False, **weights), input_activations=numbers(8, True, **activations))


MX = {"strategy": "group", "group_size": 32, **BYTES}
CONFIGS: list[tuple[str, Recipe, Config]] = [
    (
        "hf-fp8",
        BlockScaling(),
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [],
        },
    ),
    ("gpt-oss-mxfp4", MXFP4Weights(), {"quant_method": "mxfp4", "modules_to_not_convert": []}),
    (
        "modelopt-nvfp4",
        NVFP4(),
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": [],
            "producer": {"name": "octavo"},
        },
    ),
    (
        "compressed-tensors-mxfp4",
        MXFP4Weights(),
        compressed("mxfp4-pack-quantized", weights=numbers(4, False, **MX)),
    ),
    ("compressed-tensors", MXFP8(), eight_bits(MX, MX, "mxfp8-quantized")),
    (
        "compressed-tensors",
        BlockScaling(),
        eight_bits({"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}),
    ),
    ("compressed-tensors", RowScaling(), eight_bits({"strategy": "channel"}, {"strategy": "token"})),
    ("compressed-tensors", CurrentScaling(), eight_bits({"strategy": "tensor"}, {"strategy": "token"})),
]


@pytest.mark.parametrize(
    ("layout", "recipe", "wanted"), CONFIGS, ids=[f"{layout}-{recipe.kind}" for layout, recipe, _ in CONFIGS]
)
def test_the_config_says_what_the_tensors_are(layout: Any, recipe: Recipe, wanted: Config, tmp_path: Path) -> None:
    """In full: an entry that is missing has a default of the reader's."""
    facts: Config = {"activation": "clamped_swiglu", "bias": True} if layout == "gpt-oss-mxfp4" else {}
    module = GroupedMLP(1, 128, 128, recipe=recipe, dtype=torch.bfloat16, backend="torch-reference", **facts)
    export_experts(module, tmp_path / "out", layout)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == wanted
