"""What training with MXFP4Weights leaves behind: files whose values are those of the forward, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from code_planes import planes
from safetensors.torch import load_file
from torch import Tensor, nn

import octavo_torch
from octavo import BlockScaling
from octavo_numerics import round_mxfp4
from octavo_numerics.casts import decode
from octavo_torch import CodedWeight, GroupedMLP, export_experts, load_experts

E, K, F = 3, 160, 96
SIZES = [6, 0, 9]
LAYOUTS = ("gpt-oss-mxfp4", "compressed-tensors-mxfp4")


def experts(layout: str, recipe: Any = "mxfp4", **more: Any) -> nn.ModuleDict:
    facts = {"activation": "clamped_swiglu", "bias": True} if layout == "gpt-oss-mxfp4" else {}
    how: dict[str, Any] = {"recipe": recipe, "dtype": torch.bfloat16, "backend": "torch-reference", **facts, **more}
    return nn.ModuleDict({"experts": GroupedMLP(E, K, F, **how)})


def steps(model: nn.ModuleDict, count: int = 3) -> None:
    """A few steps of SGD on the masters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(count):
        optimizer.zero_grad()
        loss(model, *batch()).backward()
        optimizer.step()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(15, K).bfloat16(), torch.randn(15, K)


def loss(model: nn.ModuleDict, x: Tensor, target: Tensor) -> Tensor:
    return (model["experts"](x, SIZES).float() - target).square().mean()


def values_of(folder: Path, layout: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """weight1, gate rows first, and weight2, by the formats' definition alone."""
    tensors = {name: value.numpy() for file in folder.glob("*.safetensors") for name, value in load_file(file).items()
               if value.dtype is torch.uint8}  # fmt: skip

    def unpacked(packed: np.ndarray[Any, Any], byte: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        packed = packed.reshape(*byte.shape, 16)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(*byte.shape, 32)
        values = decode(codes, "e2m1").astype(np.float64) * 2.0 ** (byte[..., None].astype(np.float64) - 127)
        return values.reshape(*byte.shape[:-1], -1)

    if layout == "gpt-oss-mxfp4":
        both, down = (unpacked(tensors[f"experts.{name}_blocks"], tensors[f"experts.{name}_scales"])
                      for name in ("gate_up_proj", "down_proj"))  # fmt: skip
        return np.concatenate([both[:, ::2], both[:, 1::2]], 1), down
    parts = [
        np.stack([
            unpacked(tensors[f"experts.{e}.{name}.weight_packed"], tensors[f"experts.{e}.{name}.weight_scale"])
            for e in range(E)
        ])
        for name in ("gate_proj", "up_proj", "down_proj")
    ]  # fmt: skip
    return np.concatenate(parts[:2], 1), parts[2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_has_the_forwards_weights(layout: Any, rng: np.random.Generator, tmp_path: Path) -> None:
    """After training, the packed values are those that fprop and dgrad multiply: the definition's of the masters, and
    where blocks of 128x128 are too wide for E4M3 those that it holds instead."""
    model = experts(layout)
    steps(model)
    for wide in (False, True):
        if wide:
            with torch.no_grad():
                model["experts"].weight1[:, 2:9, :64] *= 2.0**-19
        folder = tmp_path / f"{wide}"
        export_experts(model, folder, layout)
        for written, name in zip(values_of(folder, layout), ("weight1", "weight2"), strict=True):
            master = getattr(model["experts"], name)
            codes = octavo_torch.quantize_weight(master, "mxfp4", backend="torch-reference").codes
            assert codes is not None
            for direction in ("rowwise", "columnwise"):
                assert (octavo_torch.dequantize(codes, direction).numpy() == written).all()  # type: ignore[arg-type]
            of_master = round_mxfp4(master.detach().float().numpy())
            assert (written == of_master).all() == (not wide or name == "weight2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loaded_file_evaluates_to_the_same_loss(layout: Any, rng: np.random.Generator, tmp_path: Path) -> None:
    """The file's values under BlockScaling, as codes and as bf16 values, are the trained model: one loss, bit for bit.
    So is the file under this recipe, which goes on training from it."""
    model, data = experts(layout), batch()
    steps(model)
    export_experts(model, tmp_path, layout)
    trained = loss(model, *data).detach()
    for recipe, weights in (
        (BlockScaling(), "codes"),
        (BlockScaling(), "values"),
        ("mxfp4", "codes"),
        ("mxfp4", "values"),
    ):
        again = experts(layout, recipe)
        assert load_experts(again, tmp_path, weights=weights) == {}  # type: ignore[arg-type]
        assert torch.equal(loss(again, *data).detach(), trained)
    steps(again, 1)
    assert not torch.equal(loss(again, *data).detach(), trained)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_load_export_is_a_fixed_point(layout: Any, rng: np.random.Generator, tmp_path: Path) -> None:
    """The same bytes again, from codes as from values, and codes that do not move when they are loaded."""
    model, folders = experts(layout), [tmp_path / str(number) for number in range(3)]
    export_experts(model, folders[0], layout)
    for weights, folder in zip(("codes", "values"), folders[1:], strict=True):
        again = experts(layout)
        load_experts(again, folders[0], weights=weights)  # type: ignore[arg-type]
        export_experts(again, folder, layout)
        if weights == "codes":
            for name in ("weight1", "weight2"):
                loaded, own = getattr(again["experts"], name), getattr(model["experts"], name)
                assert isinstance(loaded, CodedWeight)
                made = octavo_torch.quantize_weight(own, "mxfp4", backend="torch-reference")
                assert all(map(torch.equal, planes(loaded), planes(made)))
    tensors = [load_file(next(folder.glob("*.safetensors"))) for folder in folders]
    for other in tensors[1:]:
        assert other.keys() == tensors[0].keys()
        assert all(torch.equal(value, tensors[0][name]) for name, value in other.items())
