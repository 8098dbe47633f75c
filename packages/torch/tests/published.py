"""Experts as published models' files have them, drawn at random, and their values by the formats' definitions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo_numerics.casts import decode

E, K, F = 3, 256, 128
"""Experts, model width, hidden width."""
PATH = "model.layers.0.mlp.experts"
PROJECTIONS = {"gate_proj": (F, K), "up_proj": (F, K), "down_proj": (K, F)}


@dataclass
class Published:
    """Tensors by name, the quantization_config beside them, and each projection's values [E, N, K] by definition."""

    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    biases: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def write(self, folder: Path, shards: int = 1) -> Path:
        """A folder with an index, as many files, and config.json."""
        names = sorted(self.tensors)
        index = {}
        for number in range(shards):
            file, own = f"model-{number + 1:05d}-of-{shards:05d}.safetensors", names[number::shards]
            save_file({name: self.tensors[name].contiguous() for name in own}, str(folder / file), {"format": "pt"})
            index |= dict.fromkeys(own, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        (folder / "config.json").write_text(json.dumps({"quantization_config": self.config}))
        return folder

    def weights(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """weight1, gate half first, and weight2."""
        values = self.values
        return np.concatenate([values["gate_proj"], values["up_proj"]], 1), values["down_proj"]


def spread(scale: np.ndarray[Any, Any], rows: int, columns: int, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """A scale for every element."""
    return scale.repeat(rows, 0)[: shape[0]].repeat(columns, 1)[:, : shape[1]]


def e4m3(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Codes of every kind but NaN."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    return codes


def fp8_scales(rng: np.random.Generator, shape: tuple[int, ...], power_of_two: bool) -> np.ndarray[Any, Any]:
    scale = 2.0 ** rng.integers(-12, 4, shape)
    return (scale if power_of_two else scale * rng.uniform(1, 2, shape)).astype(np.float32)


def of_fp8(codes: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def hugging_face(rng: np.random.Generator, power_of_two: bool = False) -> Published:
    """DeepSeek-V3's layout."""
    made = Published({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})
    for name, shape in PROJECTIONS.items():
        values = []
        for expert in range(E):
            codes = e4m3(rng, shape)
            scale = fp8_scales(rng, (-(-shape[0] // 128), -(-shape[1] // 128)), power_of_two)
            made.tensors[f"{PATH}.{expert}.{name}.weight"] = of_fp8(codes)
            made.tensors[f"{PATH}.{expert}.{name}.weight_scale_inv"] = torch.from_numpy(scale)
            values.append(decode(codes, "e4m3") * spread(scale, 128, 128, shape))
        made.values[name] = np.stack(values)
    return made


def compressed(rng: np.random.Generator, strategy: str, power_of_two: bool = False) -> Published:
    """compressed-tensors' layout, with the scales of a strategy."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    made = Published({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups})
    for name, (n, k) in PROJECTIONS.items():
        values = []
        for expert in range(E):
            codes = e4m3(rng, (n, k))
            grid = {"block": (-(-n // 128), -(-k // 128)), "channel": (n, 1), "tensor": (1, 1)}[strategy]
            unit = {"block": (128, 128), "channel": (1, k), "tensor": (n, k)}[strategy]
            scale = fp8_scales(rng, grid, power_of_two)
            made.tensors[f"{PATH}.{expert}.{name}.weight"] = of_fp8(codes)
            stored = torch.from_numpy(scale)
            made.tensors[f"{PATH}.{expert}.{name}.weight_scale"] = stored.reshape(1) if strategy == "tensor" else stored
            values.append(decode(codes, "e4m3") * spread(scale, *unit, (n, k)))
        made.values[name] = np.stack(values)
    return made


def mxfp8(rng: np.random.Generator, square: bool = False) -> Published:
    """compressed-tensors' MXFP8 layout; square: rows of 32 have one scale."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    made = Published({"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": groups})
    for name, (n, k) in PROJECTIONS.items():
        values = []
        for expert in range(E):
            codes = e4m3(rng, (n, k))
            byte = rng.integers(100, 140, (n // 32 if square else n, k // 32), dtype=np.uint8)
            byte = byte.repeat(32, 0) if square else byte
            made.tensors[f"{PATH}.{expert}.{name}.weight"] = of_fp8(codes)
            made.tensors[f"{PATH}.{expert}.{name}.weight_scale"] = torch.from_numpy(byte)
            multiplier = np.exp2(byte.astype(np.float32) - 127)
            values.append(decode(codes, "e4m3") * spread(multiplier, 1, 32, (n, k)))
        made.values[name] = np.stack(values)
    return made


def mxfp4(rng: np.random.Generator) -> Published:
    """compressed-tensors' MXFP4 layout."""
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    made = Published({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": groups})
    for name, (n, k) in PROJECTIONS.items():
        codes = rng.integers(0, 16, (E, n, k), dtype=np.uint8)
        byte = rng.integers(113, 128, (E, n, k // 32), dtype=np.uint8)
        for expert in range(E):
            whole = f"{PATH}.{expert}.{name}"
            packed = codes[expert, :, ::2] | codes[expert, :, 1::2] << 4
            made.tensors |= {f"{whole}.weight_packed": torch.from_numpy(packed)}
            made.tensors |= {f"{whole}.weight_scale": torch.from_numpy(byte[expert].copy())}
        multiplier = np.exp2(byte.astype(np.float32) - 127)
        made.values[name] = decode(codes, "e2m1") * multiplier.repeat(32, -1)
    return made


def gpt_oss(rng: np.random.Generator, binades: int = 14) -> Published:
    """gpt-oss's layout: exponents within a block of 128x128 span `binades` powers of two."""
    made = Published({"quant_method": "mxfp4"})
    for name, (n, k) in {"gate_up_proj": (2 * F, K), "down_proj": (K, F)}.items():
        codes = rng.integers(0, 16, (E, n, k), dtype=np.uint8)
        exponent = rng.integers(127 - binades, 128, (E, n, k // 32), dtype=np.uint8)
        exponent[:, :2, :] = 127  # both ends are there
        exponent[:, 2:4, :] = 127 - binades
        made.tensors[f"{PATH}.{name}_blocks"] = torch.from_numpy(
            (codes[..., ::2] | codes[..., 1::2] << 4).reshape(E, n, k // 32, 16)
        )
        made.tensors[f"{PATH}.{name}_scales"] = torch.from_numpy(exponent)
        bias = torch.randn(E, n).bfloat16()
        made.tensors[f"{PATH}.{name}_bias"] = bias
        values = decode(codes, "e2m1") * np.exp2(exponent.astype(np.float64) - 127).repeat(32, -1)
        kept = values.astype(np.float32), bias.float().numpy()
        for store, value in zip((made.values, made.biases), kept, strict=True):
            store |= {"gate_proj": value[:, ::2], "up_proj": value[:, 1::2]} if name != "down_proj" else {name: value}
    return made


def modelopt(rng: np.random.Generator, square: bool = False, one_factor: bool = True) -> Published:
    """ModelOpt's layout; square: rows of 16 have one scale; one_factor: gate and up share their second level."""
    made = Published({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16})
    for expert in range(E):
        shared = np.float32(rng.uniform(1e-4, 1e-3))
        for name, (n, k) in PROJECTIONS.items():
            codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
            scale = rng.integers(8, 0x7F, (n // 16 if square else n, k // 16), dtype=np.uint8)
            scale = scale.repeat(16, 0) if square else scale
            factor = shared if one_factor else np.float32(rng.uniform(1e-4, 1e-3))
            whole = f"{PATH}.{expert}.{name}"
            made.tensors[f"{whole}.weight"] = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
            made.tensors[f"{whole}.weight_scale"] = of_fp8(scale)
            made.tensors[f"{whole}.weight_scale_2"] = torch.tensor(factor)
            made.tensors[f"{whole}.input_scale"] = torch.tensor(1.0)
            multiplier = scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * factor
            made.values.setdefault(name, np.empty((E, n, k), np.float32))[expert] = decode(codes, "e2m1") * spread(
                multiplier, 1, 16, (n, k)
            )
    return made
