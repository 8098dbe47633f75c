"""What a layout of quantized files is: which tensors belong to a matrix, and how they become blocks and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from octavo import QuantizerSpec
from octavo.errors import shown
from octavo.formats import FORMAT_MAX
from octavo_torch.arrays.checks import brief
from octavo_torch.checkpoint.codes import check_scales
from octavo_torch.checkpoint.formats.blocks import Blocks

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Layout(ABC):
    """One layout of files.

    name      of the layout, for callers
    kinds     of the tensors of a matrix: what stands behind its name and `joint`
    ignored   other kinds that a file may have, and that say nothing about the weight's values
    stacked   one tensor holds the matrices of all experts, gate and up rows in turns
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    ignored: ClassVar[tuple[str, ...]] = ()
    stacked: ClassVar[bool] = False

    @property
    def joint(self) -> str:
        """What stands between a projection's name and a kind."""
        return "_" if self.stacked else "."

    @abstractmethod
    def read(self, name: str, tensors: Mapping[str, Tensor]) -> Blocks:
        """The matrix `name` of these tensors by kind; ValueError where they do not fit each other."""

    @abstractmethod
    def write(self, name: str, blocks: Blocks, spec: QuantizerSpec) -> dict[str, Tensor]:
        """The inverse of `read`, of codes of this spec; ValueError where the layout does not hold them."""

    @abstractmethod
    def refuses(self, spec: QuantizerSpec) -> str | None:
        """What the layout needs, where it cannot hold weights of this spec."""

    @abstractmethod
    def check(self, config: Mapping[str, object]) -> None:
        """ValueError where a file's own description of its quantization is another layout's."""

    @abstractmethod
    def config(self, spec: QuantizerSpec, plain: list[str]) -> dict[str, object]:
        """quantization_config of a model whose modules `plain` are not quantized."""


def check_entry(config: Mapping[str, object], key: str, allowed: tuple[object, ...]) -> None:
    """ValueError unless the description has one of these values under `key`; None among them: `key` may be absent."""
    value = config.get(key)
    if not any(value == one and type(value) is type(one) for one in allowed):
        wanted = " or ".join(repr(one) for one in allowed if one is not None)
        raise ValueError(
            f"quantization_config has {key} {shown(value)}, and files of this layout have {wanted}; give such a file"
        )


def compressed_tensors(form: str, groups: Mapping[str, object], plain: list[str]) -> dict[str, object]:
    """The quantization_config of compressed-tensors.

    form     its name of how tensors are stored
    groups   what it says of "weights" and, where they are quantized, of "input_activations"
    plain    names of modules in high precision
    """
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **groups}},
        "ignore": plain,
    }


def check_matrix(name: str, value: Tensor, dtype: torch.dtype, axes: int = 2) -> None:
    """ValueError unless `value` is a matrix of codes of this dtype, without NaN."""
    if value.dtype is not dtype or value.dim() != axes or not value.numel():
        raise ValueError(
            f"{name} is {brief(value)} in the file; give {axes} axes of {str(dtype).removeprefix('torch.')}"
        )
    if dtype is torch.float8_e4m3fn and _has_nan(value):
        where = ((value.view(torch.uint8) & 0x7F) == 0x7F).nonzero()[0].tolist()
        raise ValueError(f"{name}{where} is NaN in the file, which no weight is; give a file of finite values")


def _has_nan(codes: Tensor) -> bool:
    """Whether E4M3 codes hold a NaN. Its two NaNs are the largest bytes, as unsigned and as signed integers, so two
    maxima tell without a temporary tensor."""
    return bool((codes.view(torch.uint8).amax() == 0xFF) | (codes.view(torch.int8).amax() == 0x7F))


def scales_of(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Scales as float32, or as E8M0's bytes; ValueError unless they have this shape and are finite and positive."""
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{name} has shape {list(value.shape)} in the file and its codes need {list(shape)}; give it so"
        )
    if value.dtype is torch.float8_e8m0fnu:
        value = value.view(torch.uint8)
        check_scales(name, value, "e8m0")
        return value
    if value.dtype not in _FLOATS:
        raise ValueError(f"{name} is {brief(value)} in the file; give scales of float32, bfloat16 or float8_e8m0fnu")
    value = value.float()
    check_scales(name, value, "fp32")
    return value


def check_range(name: str, blocks: Blocks) -> Blocks:
    """`blocks`; ValueError where a scale is so large that a code's value could overflow fp32."""
    limit = FORMAT_MAX["e2m1" if blocks.codes.dtype is torch.uint8 else "e4m3"]
    large = ~(blocks.multipliers() * limit).isfinite()
    if bool(large.any()):
        where = large.nonzero()[0].tolist()
        raise ValueError(
            f"{name}{where} is {blocks.multipliers()[tuple(where)].item()} in the file, past what weights in fp32 can "
            "have; give a file of finite values"
        )
    return blocks


def needed_scale(name: str, blocks: Blocks, unit: tuple[int, int]) -> Tensor:
    """Scales of units of this size; ValueError where a unit has several."""
    scale = blocks.scale_of(unit)
    if scale is None:
        raise ValueError(
            f"{name} {list(blocks.codes.shape)} has scales of {blocks.block[0]}x{blocks.block[1]}, which the layout's "
            f"{unit[0]}x{unit[1]} do not hold; make gate and up multiples of {unit[0]} rows, or take another layout"
        )
    return scale
