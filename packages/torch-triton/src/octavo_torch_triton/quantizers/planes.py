"""The planes of an operand: their names, shapes and dtypes, in the plain layout and in this package's own.

"turned" is a layout of columnwise FP8 codes, [P, C, 128]: panels of 128 rows of one group, packed in group order, in
which the rows of a column lie side by side, zeros past the group's last. FP8 products read both operands along the sum,
and no chip's tensor cores turn bytes on the way. Scales stay plain.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
from torch import Tensor

from octavo import GroupedTensorSpec, QuantizerSpec, block_bound
from octavo.formats import ScaleFormat
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction
from octavo_torch.plugin_api import FP8_DTYPE, GroupedTensor, plain_layout

TURNED = "turned"
TURNED_SCALINGS = frozenset({"delayed", "current", "row", "block"})
PANEL_ROWS = 128

SCALE_DTYPE: dict[ScaleFormat, torch.dtype] = {
    "fp32": torch.float32,
    "e8m0": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}
"""The dtype of decode scales in each format."""

Outputs = list[tuple[tuple[int, ...], torch.dtype]]


def output_names(layout: GroupedTensorSpec) -> list[str]:
    """The planes in the order in which the operator returns them; what both directions share is made once."""
    spec = layout.quantizer
    shares = spec.shares_codes and layout.columnwise_layout == PLAIN
    directions = ("rowwise",) if shares else spec.directions
    names = [direction + part for direction in directions for part in parts_of(spec)]
    if spec.shares_codes and "rowwise_scale" in names:
        names = [name for name in names if name != "columnwise_scale"]
    return names


def parts_of(spec: QuantizerSpec) -> tuple[str, ...]:
    """What a plane has beside codes, as suffixes."""
    return ("", "_scale", "_global") if spec.scaling == "nvfp4" else ("", "_scale")


def outputs_of(layout: GroupedTensorSpec) -> Outputs:
    """Shape and dtype of each plane in that order."""
    spec = layout.quantizer
    payload = torch.uint8 if spec.format == "e2m1" else FP8_DTYPE[spec.format]
    outputs: Outputs = []
    for name in output_names(layout):
        direction: Direction = "rowwise" if name.startswith("rowwise") else "columnwise"
        if name.endswith("_global"):
            outputs.append(((layout.groups,), torch.float32))
        elif name.endswith("_scale"):
            outputs.append((layout.scale_shape(direction), SCALE_DTYPE[spec.scale_format]))
        elif direction == "columnwise" and layout.columnwise_layout == TURNED:
            outputs.append((turned_shape(layout), payload))
        else:
            outputs.append((layout.payload_shape(direction), payload))
    return outputs


def turned_shape(layout: GroupedTensorSpec) -> tuple[int, int, int]:
    """[P, C, 128] of column codes in panels."""
    rows, columns = layout.shape[-2:]
    ragged = layout.ragged_axis == 0
    panels = block_bound(rows, layout.groups, PANEL_ROWS) if ragged else layout.groups * -(-rows // PANEL_ROWS)
    return panels, columns, PANEL_ROWS


def layout_for(quantizer: str, x: Tensor, groups: int, columnwise: str = PLAIN) -> GroupedTensorSpec:
    """The layout of `x` quantized; sizes that a compiler traces become integers."""
    return _layout(quantizer, tuple([int(size) for size in x.shape]), groups, columnwise)


@lru_cache(maxsize=1024)
def _layout(quantizer: str, shape: tuple[int, ...], groups: int, columnwise: str) -> GroupedTensorSpec:
    # the same object for the same layout: GEMMs find what they know about a spec by its identity
    plain = plain_layout(quantizer, shape, groups)
    if columnwise == PLAIN or "columnwise" not in plain.quantizer.directions:
        return plain
    return GroupedTensorSpec(**{**dict(plain), "columnwise_layout": columnwise})


def assembled(layout: GroupedTensorSpec, group_sizes: Tensor | None, outputs: list[Tensor]) -> GroupedTensor:
    """The GroupedTensor of the operator's outputs."""
    spec = layout.quantizer
    planes = dict(zip(output_names(layout), outputs, strict=True))
    if spec.shares_codes:
        # whichever direction's planes were made serve both
        names = [(direction, part) for direction in spec.directions for part in parts_of(spec)]
        made = dict(planes)
        planes = {
            direction + part: made[direction + part if direction + part in made else "rowwise" + part]
            for direction, part in names
        }
    return GroupedTensor(layout, group_sizes, **planes)


def pattern(value: float) -> int:
    """The int32 pattern of a number rounded to fp32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def kernels_scaling(spec: QuantizerSpec) -> str:
    """How kernels.operands finds a scale: "group" for one per group, whatever it was computed from."""
    return "group" if spec.scaling in ("delayed", "current") else spec.scaling
