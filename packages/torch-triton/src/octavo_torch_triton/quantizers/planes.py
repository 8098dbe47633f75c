"""The planes of an operand as tensors: shapes and dtypes, in the plain layout and in the turned one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from octavo import GroupedTensorSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction
from octavo_torch.plugin_api import PAYLOAD_DTYPE, SCALE_DTYPE, GroupedTensor, plain_layout
from octavo_triton.layouts import TURNED, output_names, turned_layout, turned_shape, with_shared

Outputs = list[tuple[tuple[int, ...], torch.dtype]]


def outputs_of(layout: GroupedTensorSpec) -> Outputs:
    """Shape and dtype of each plane in that order."""
    spec = layout.quantizer
    payload = PAYLOAD_DTYPE[spec.format]
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


def layout_for(quantizer: str, x: Tensor, groups: int, columnwise: str = PLAIN) -> GroupedTensorSpec:
    """The layout of `x` quantized; sizes that a compiler traces become integers."""
    return _layout(quantizer, tuple([int(size) for size in x.shape]), groups, columnwise)


@lru_cache(maxsize=1024)
def _layout(quantizer: str, shape: tuple[int, ...], groups: int, columnwise: str) -> GroupedTensorSpec:
    # the same object for the same layout: GEMMs find what they know about a spec by its identity
    return turned_layout(plain_layout(quantizer, shape, groups), columnwise)


def assembled(layout: GroupedTensorSpec, group_sizes: Tensor | None, outputs: list[Tensor]) -> GroupedTensor:
    """The GroupedTensor of the operator's outputs."""
    made = dict(zip(output_names(layout), outputs, strict=True))
    planes: dict[str, Any] = with_shared(layout.quantizer, dict(made))
    return GroupedTensor(layout, group_sizes, **planes)
