"""out=: the caller's tensors that a launch writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo_torch.plugin_api import GroupedTensor, dtype_text
from octavo_torch_native.quantizers.launches import QuantizeLaunch
from octavo_torch_native.quantizers.planes import Shape
from octavo_torch_native.quantizers.shapes import QuantizeShapes


def check_buffer(name: str, value: Tensor | None, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`value`; ValueError unless it is a contiguous tensor of this shape, dtype and device."""
    if value is None:
        raise ValueError(f"{name} is None; give {dtype_text(dtype)} {list(shape)} on {device}")
    if tuple(value.shape) != shape or value.dtype is not dtype or value.device != device or not value.is_contiguous():
        strides = "" if value.is_contiguous() else f" of strides {list(value.stride())}"
        raise ValueError(
            f"{name} is {dtype_text(value.dtype)} {list(value.shape)}{strides} on {value.device}; "
            f"give contiguous {dtype_text(dtype)} {list(shape)} on {device}"
        )
    return value


def planes_of(out: GroupedTensor, launch: QuantizeLaunch, shapes: QuantizeShapes, device: torch.device) -> list[Tensor]:
    """The tensors of `out` in the order of the launch's outputs; ValueError that names the field that does not fit."""
    if out.spec != shapes.spec:
        raise ValueError(f"out.spec is {out.spec!r} and the result's {shapes.spec!r}; give one of the same spec")
    planes: dict[int, Tensor] = {}
    for field, number in launch.fields:
        shape, dtype = shapes.outputs[number]
        value = check_buffer(f"out.{field}", getattr(out, field), shape, dtype, device)
        first = planes.setdefault(number, value)
        if value is not first and value.data_ptr() != first.data_ptr():
            raise ValueError(
                f"out.{field} and out.{field.replace('columnwise', 'rowwise')} are different tensors and "
                f"{shapes.spec.quantizer.scaling} data share them; give the one tensor in both fields"
            )
    return [planes[number] for number in sorted(planes)]


def write_sizes(out: GroupedTensor, group_sizes: Tensor | None) -> None:
    """The sizes of the result into `out`."""
    if group_sizes is None or out.group_sizes is group_sizes:
        return
    shape: Sequence[int] = group_sizes.shape
    check_buffer("out.group_sizes", out.group_sizes, tuple(shape), torch.int64, group_sizes.device).copy_(group_sizes)
