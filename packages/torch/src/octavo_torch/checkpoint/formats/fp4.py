"""FP4 files: two E2M1 codes per byte, with E8M0 scales of 1x32 blocks, or E4M3 scales of 1x16 and an fp32 factor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo_torch.arithmetic.casts import bits_of, e2m1_table, float_from, to_e2m1
from octavo_torch.arrays.checks import brief
from octavo_torch.checkpoint.codes import check_scales
from octavo_torch.checkpoint.formats.blocks import Blocks, pack, unpack
from octavo_torch.checkpoint.formats.layouts import (
    Layout,
    check_entry,
    check_matrix,
    check_range,
    compressed_tensors,
    needed_scale,
)

_MX, _NV = 32, 16


class GptOssMxfp4(Layout):
    """gpt-oss's MXFP4: `gate_up_proj_blocks` uint8 [E, N, K / 32, 16] and `gate_up_proj_scales` uint8 [E, N, K / 32].

    value = E2M1 code * 2^(scale - 127); the first of two codes is in the low nibble. Source: OCP Microscaling Formats
    specification v1.0, sections 5 and 6; transformers' integrations/mxfp4.py.
    """

    name = "gpt-oss-mxfp4"
    kinds = ("blocks", "scales")
    stacked = True

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> Blocks:
        """As Layout says, of one expert's tensors."""
        packed, scale = tensors["blocks"], tensors["scales"]
        check_matrix(f"{name}_blocks", packed, torch.uint8, axes=3)
        rows, count, width = packed.shape
        if width != _MX // 2:
            raise ValueError(f"{name}_blocks is {brief(packed)} in the file; give 16 bytes per block of 32 codes")
        if scale.dtype is not torch.uint8 or tuple(scale.shape) != (rows, count):
            raise ValueError(f"{name}_scales is {brief(scale)} in the file; give uint8 {[rows, count]}")
        check_scales(f"{name}_scales", scale, "e8m0")
        return check_range(f"{name}_scales", Blocks(unpack(packed).reshape(rows, -1), scale, (1, _MX)))

    def write(self, name: str, blocks: Blocks, spec: QuantizerSpec) -> dict[str, Tensor]:
        """As Layout says."""
        codes, byte = _mxfp4_of(name, blocks)
        return {"blocks": pack(codes), "scales": byte}

    def refuses(self, spec: QuantizerSpec) -> str | None:
        """As Layout says; whether values fit is seen when they are written."""
        return _refuses_mxfp4(spec)

    def check(self, config: Mapping[str, object]) -> None:
        """As Layout says."""
        check_entry(config, "quant_method", ("mxfp4",))

    def config(self, spec: QuantizerSpec, plain: list[str]) -> dict[str, object]:
        """As Layout says."""
        return {"quant_method": "mxfp4", "modules_to_not_convert": plain}


class CompressedMxfp4(Layout):
    """compressed-tensors' mxfp4-pack-quantized: `weight_packed` uint8 [N, K / 2], `weight_scale` uint8 [N, K / 32].

    Values and the order of two codes in a byte as in GptOssMxfp4, with gate and up projection by themselves.
    """

    name = "compressed-tensors-mxfp4"
    kinds = ("weight_packed", "weight_scale")

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> Blocks:
        """As Layout says."""
        packed, scale = (tensors[kind] for kind in self.kinds)
        check_matrix(f"{name}.weight_packed", packed, torch.uint8)
        needed = (packed.shape[0], 2 * packed.shape[1] // _MX)
        if scale.dtype is not torch.uint8 or tuple(scale.shape) != needed or 2 * packed.shape[1] % _MX:
            raise ValueError(
                f"{name}.weight_packed is {brief(packed)} and its scale {brief(scale)} in the file; give a scale uint8 "
                f"{list(needed)}, and a multiple of 32 codes per row"
            )
        check_scales(f"{name}.weight_scale", scale, "e8m0")
        return check_range(f"{name}.weight_scale", Blocks(unpack(packed), scale, (1, _MX)))

    def write(self, name: str, blocks: Blocks, spec: QuantizerSpec) -> dict[str, Tensor]:
        """As Layout says."""
        codes, byte = _mxfp4_of(name, blocks)
        return {"weight_packed": pack(codes.flatten(1)), "weight_scale": byte}

    def refuses(self, spec: QuantizerSpec) -> str | None:
        """As Layout says; whether values fit is seen when they are written."""
        return _refuses_mxfp4(spec)

    def check(self, config: Mapping[str, object]) -> None:
        """As Layout says."""
        check_entry(config, "quant_method", ("compressed-tensors",))
        check_entry(config, "format", ("mxfp4-pack-quantized",))
        check_entry(config, "quantization_status", ("compressed", None))

    def config(self, spec: QuantizerSpec, plain: list[str]) -> dict[str, object]:
        """As Layout says, with activations in high precision, which every engine of this format has."""
        weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "strategy": "group"}
        weights |= {"group_size": _MX, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        return compressed_tensors("mxfp4-pack-quantized", {"weights": weights}, plain)


def _refuses_mxfp4(spec: QuantizerSpec) -> str | None:
    fits = spec.format == "e4m3" and spec.scaling in ("block", "mxfp8")
    return None if fits else "E4M3 codes with scales of blocks whose values are MXFP4's"


def _mxfp4_of(name: str, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """E2M1 codes [R, K / 32, 32] and E8M0 bytes [R, K / 32] with exactly these values.

    The scale makes each block's largest magnitude 4 or 6, as OCP's rule does. ValueError where MXFP4 lacks a value.
    """
    rows, columns = blocks.codes.shape
    if columns % _MX:
        raise ValueError(f"{name} has {columns} columns; MXFP4 needs a multiple of 32, so take another layout")
    values = blocks.values().view(rows, -1, _MX)
    amax = bits_of(values.abs().amax(-1))
    byte = ((amax >> 23) - 2).clamp(0, 253).masked_fill(amax == 0, 127)
    scaled = values * float_from((254 - byte) << 23)[..., None]
    codes = to_e2m1(scaled, torch.zeros((), dtype=torch.bool, device=scaled.device))
    changed = int((e2m1_table(codes.device)[codes.int()] != scaled).sum())
    if changed:
        raise ValueError(
            f"{name} has {changed} of {values.numel()} values that MXFP4 does not hold; take another layout, such as "
            "'hf-fp8', or train weights whose values are MXFP4's"
        )
    return codes, byte.to(torch.uint8)


class ModelOptNvfp4(Layout):
    """ModelOpt's NVFP4: `weight` uint8 [N, K / 2], `weight_scale` E4M3 [N, K / 16], `weight_scale_2` fp32 scalar.

    value = fl(code * fl(scale * scale_2)); the first of two codes is in the low nibble.
    """

    name = "modelopt-nvfp4"
    kinds = ("weight", "weight_scale", "weight_scale_2")
    ignored = ("input_scale",)

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> Blocks:
        """As Layout says."""
        packed, scale, factor = (tensors[kind] for kind in self.kinds)
        check_matrix(f"{name}.weight", packed, torch.uint8)
        rows, columns = packed.shape[0], 2 * packed.shape[1]
        if columns % _NV:
            raise ValueError(f"{name}.weight is {brief(packed)} in the file; give a multiple of 16 codes per row")
        if scale.dtype is not torch.float8_e4m3fn or tuple(scale.shape) != (rows, columns // _NV):
            raise ValueError(
                f"{name}.weight_scale is {brief(scale)} in the file; give float8_e4m3fn {[rows, columns // _NV]}"
            )
        if factor.dtype is not torch.float32 or tuple(factor.shape) not in ((), (1,)):
            raise ValueError(f"{name}.weight_scale_2 is {brief(factor)} in the file; give a float32 scalar")
        check_scales(f"{name}.weight_scale", scale, "e4m3")
        check_scales(f"{name}.weight_scale_2", factor, "fp32")
        blocks = Blocks(unpack(packed), scale, (1, _NV), factor.reshape(()))
        return check_range(f"{name}.weight_scale", blocks)

    def write(self, name: str, blocks: Blocks, spec: QuantizerSpec) -> dict[str, Tensor]:
        """As Layout says."""
        columns = blocks.codes.shape[1]
        if columns % _NV:
            raise ValueError(f"{name} has {columns} columns; the layout needs a multiple of 16, so take another one")
        scale = needed_scale(name, blocks, (1, _NV))
        assert blocks.factor is not None  # of NVFP4
        return {
            "weight": pack(blocks.codes),
            "weight_scale": scale.contiguous(),
            "weight_scale_2": blocks.factor.clone(),
        }

    def refuses(self, spec: QuantizerSpec) -> str | None:
        """As Layout says."""
        return None if spec.scaling == "nvfp4" else "NVFP4's codes and scales"

    def check(self, config: Mapping[str, object]) -> None:
        """As Layout says."""
        check_entry(config, "quant_method", ("modelopt", "nvfp4", None))
        check_entry(config, "quant_algo", ("NVFP4",))
        check_entry(config, "group_size", (_NV, None))

    def config(self, spec: QuantizerSpec, plain: list[str]) -> dict[str, object]:
        """As Layout says."""
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": _NV,
            "ignore": plain,
            "producer": {"name": "octavo"},
        }
