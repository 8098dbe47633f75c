"""The planes of an operand: their names, shapes and dtypes in the plain layout, the only one that this package has."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.formats import ScaleFormat
from octavo.quantizer import Direction
from octavo_torch.plugin_api import FP8_DTYPE, GroupedTensor, plain_layout

SCALE_DTYPE: dict[ScaleFormat, torch.dtype] = {
    "fp32": torch.float32,
    "e8m0": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}
"""The dtype of decode scales in each format."""

Outputs = list[tuple[tuple[int, ...], torch.dtype]]


def made_directions(spec: QuantizerSpec) -> tuple[Direction, ...]:
    """The directions that are computed: codes that both share are computed once, as row data."""
    return ("rowwise",) if spec.shares_codes else spec.directions


def output_names(spec: QuantizerSpec) -> list[str]:
    """The planes in the order in which the operator returns them."""
    parts = ("", "_scale", "_global") if spec.scaling == "nvfp4" else ("", "_scale")
    return [direction + part for direction in made_directions(spec) for part in parts]


def outputs_of(layout: GroupedTensorSpec) -> Outputs:
    """Shape and dtype of each plane in that order."""
    spec = layout.quantizer
    payload = torch.uint8 if spec.format == "e2m1" else FP8_DTYPE[spec.format]
    outputs: Outputs = []
    for direction in made_directions(spec):
        outputs.append((layout.payload_shape(direction), payload))
        outputs.append((layout.scale_shape(direction), SCALE_DTYPE[spec.scale_format]))
        if spec.scaling == "nvfp4":
            outputs.append(((layout.groups,), torch.float32))
    return outputs


def layout_for(quantizer: str, x: Tensor, groups: int) -> GroupedTensorSpec:
    """The layout of `x` quantized; sizes that a compiler traces become integers."""
    return plain_layout(quantizer, tuple([int(size) for size in x.shape]), groups)


def assembled(layout: GroupedTensorSpec, group_sizes: Tensor | None, outputs: list[Tensor]) -> GroupedTensor:
    """The GroupedTensor of the operator's outputs."""
    spec = layout.quantizer
    planes = dict(zip(output_names(spec), outputs, strict=True))
    if spec.shares_codes:
        planes = {
            name.replace("rowwise", direction): plane for direction in spec.directions for name, plane in planes.items()
        }
    return GroupedTensor(layout, group_sizes, **planes)


def pattern(value: float) -> int:
    """The int32 pattern of a number rounded to fp32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def kernels_scaling(spec: QuantizerSpec) -> str:
    """How kernels.operands finds a scale: "group" for one per group, whatever it was computed from."""
    return "group" if spec.scaling in ("delayed", "current") else spec.scaling
