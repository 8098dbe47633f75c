"""FP8 files: E4M3 codes [N, K] of each projection, and scales of 128x128 or 1x32 blocks, of rows or of the whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo.errors import shown
from octavo_torch.checkpoint.formats.blocks import Blocks
from octavo_torch.checkpoint.formats.layouts import (
    Layout,
    check_entry,
    check_matrix,
    check_range,
    compressed_tensors,
    needed_scale,
    scales_of,
)

_BLOCK, _MX = 128, 32
_MXFP8 = "mxfp8-quantized"


class HuggingFaceFp8(Layout):
    """DeepSeek-V3's and Qwen3's: `weight`, and decode scales of 128x128 blocks in `weight_scale_inv`.

    Source: DeepSeek-V3's inference/kernel.py, weight_dequant; transformers' FineGrainedFP8Config.
    """

    name = "hf-fp8"
    kinds = ("weight", "weight_scale_inv")

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> Blocks:
        """As Layout says."""
        codes = tensors["weight"]
        check_matrix(f"{name}.weight", codes, torch.float8_e4m3fn)
        grid = (-(-codes.shape[0] // _BLOCK), -(-codes.shape[1] // _BLOCK))
        scale_name = f"{name}.weight_scale_inv"
        scale = scales_of(scale_name, tensors["weight_scale_inv"], grid)
        return check_range(scale_name, Blocks(codes, scale, (_BLOCK, _BLOCK)))

    def write(self, name: str, blocks: Blocks, spec: QuantizerSpec) -> dict[str, Tensor]:
        """As Layout says. Sides are multiples of 128, because readers divide other sides differently."""
        rows, columns = blocks.codes.shape
        if rows % _BLOCK or columns % _BLOCK:
            raise ValueError(
                f"{name} is [{rows}, {columns}], and readers of {self.name} agree on blocks of multiples of 128 alone; "
                "take another layout"
            )
        scale = needed_scale(name, blocks, (_BLOCK, _BLOCK))
        return {"weight": blocks.codes.contiguous(), "weight_scale_inv": scale.contiguous()}

    def refuses(self, spec: QuantizerSpec) -> str | None:
        """As Layout says."""
        fits = spec.format == "e4m3" and spec.scaling in ("block", "current", "delayed")
        return None if fits else "E4M3 codes with fp32 scales of 128x128 blocks, or of a whole expert"

    def check(self, config: Mapping[str, object]) -> None:
        """As Layout says."""
        check_entry(config, "quant_method", ("fp8",))
        check_entry(config, "fmt", ("e4m3", "float8_e4m3fn", None))  # the second is MiniMax-M2's
        check_entry(config, "weight_block_size", ([_BLOCK, _BLOCK],))
        check_entry(config, "scale_fmt", ("float", "ue8m0", None))
        check_entry(config, "expert_dtype", ("fp8", None))

    def config(self, spec: QuantizerSpec, plain: list[str]) -> dict[str, object]:
        """As Layout says."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
            "modules_to_not_convert": plain,
        }


class CompressedTensors(Layout):
    """compressed-tensors' FP8: `weight` and `weight_scale`, whose shape and dtype say what shares a scale.

    float-quantized: [ceil(N / 128), ceil(K / 128)] of blocks, [N, 1] of channels, [1] or a scalar of the tensor;
    mxfp8-quantized: uint8 [N, ceil(K / 32)], E8M0.
    """

    name = "compressed-tensors"
    kinds = ("weight", "weight_scale")
    ignored = ("input_scale",)

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> Blocks:
        """As Layout says."""
        codes, scale = tensors["weight"], tensors["weight_scale"]
        check_matrix(f"{name}.weight", codes, torch.float8_e4m3fn)
        rows, columns = codes.shape
        shape, unit = (-(-rows // _BLOCK), -(-columns // _BLOCK)), (_BLOCK, _BLOCK)
        if scale.dtype is torch.uint8:
            scale, shape, unit = scale.view(torch.float8_e8m0fnu), (rows, -(-columns // _MX)), (1, _MX)
        elif tuple(scale.shape) in ((), (1,)):
            scale, shape, unit = scale.reshape(1, 1), (1, 1), (rows, columns)
        elif tuple(scale.shape) == (rows, 1):
            shape, unit = (rows, 1), (1, columns)
        scale = scales_of(f"{name}.weight_scale", scale, shape)
        return check_range(f"{name}.weight_scale", Blocks(codes, scale, unit))

    def write(self, name: str, blocks: Blocks, spec: QuantizerSpec) -> dict[str, Tensor]:
        """As Layout says."""
        rows, columns = blocks.codes.shape
        unit: tuple[int, int] = (rows, columns)
        shape: tuple[int, ...] = (1,)
        if spec.scaling == "block":
            unit, shape = (_BLOCK, _BLOCK), (-(-rows // _BLOCK), -(-columns // _BLOCK))
        elif spec.scaling == "row":
            unit, shape = (1, columns), (rows, 1)
        elif spec.scaling == "mxfp8":
            if columns % _MX:
                raise ValueError(f"{name} has {columns} columns; MXFP8 needs a multiple of 32, so take another layout")
            unit, shape = (1, _MX), (rows, columns // _MX)
        scale = needed_scale(name, blocks, unit).reshape(shape)
        return {"weight": blocks.codes.contiguous(), "weight_scale": scale.contiguous()}

    def refuses(self, spec: QuantizerSpec) -> str | None:
        """As Layout says."""
        return None if spec.format == "e4m3" else "E4M3 codes"

    def check(self, config: Mapping[str, object]) -> None:
        """As Layout says."""
        if config.get("quant_method") == "modelopt" or "quant_algo" in config:
            check_entry(config, "quant_algo", ("FP8",))  # the same tensors, with one scale each
            return
        check_entry(config, "quant_method", ("compressed-tensors",))
        check_entry(config, "format", ("float-quantized", "naive-quantized", _MXFP8, None))
        check_entry(config, "quantization_status", ("compressed", None))
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping):
            raise ValueError(f"quantization_config has config_groups {shown(groups)}; give a file with its groups")
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if not isinstance(weights, Mapping):
                raise ValueError("quantization_config has a group without weights; give a file of quantized weights")
            check_entry(weights, "num_bits", (8,))
            check_entry(weights, "type", ("float",))
            check_entry(weights, "symmetric", (True, None))
            if weights.get("strategy") == "group":
                check_entry(weights, "group_size", (_MX,))
                check_entry(config, "format", (_MXFP8,))
                continue
            check_entry(weights, "strategy", ("block", "channel", "tensor"))
            check_entry(weights, "block_structure", ([_BLOCK, _BLOCK], None))

    def config(self, spec: QuantizerSpec, plain: list[str]) -> dict[str, object]:
        """As Layout says."""
        strategy = {"block": "block", "row": "channel", "mxfp8": "group"}.get(spec.scaling, "tensor")
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
        rows = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
        if strategy == "block":
            weights["block_structure"] = [_BLOCK, _BLOCK]
            rows |= {"strategy": "group", "group_size": _BLOCK}
        elif strategy == "group":
            weights |= {"group_size": _MX, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
            rows |= {name: weights[name] for name in ("strategy", "group_size", "scale_dtype", "zp_dtype")}
        form = _MXFP8 if strategy == "group" else "float-quantized"
        return compressed_tensors(form, {"weights": weights, "input_activations": rows}, plain)
