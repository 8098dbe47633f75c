"""The planes of a weight on their way through FSDP2: their names, and GroupedTensors assembled from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo_torch.arrays.dtypes import PAYLOAD_DTYPE, SCALE_DTYPE
from octavo_torch.arrays.grouped_tensor import PLANES, GroupedTensor
from octavo_torch.quantizers.arguments import direction_name


def from_planes(spec: GroupedTensorSpec, planes: Mapping[str, Tensor | None]) -> GroupedTensor:
    """A plain GroupedTensor of stacked matrices; shared codes serve both directions."""
    if spec.quantizer.shares_codes:
        planes = {
            direction + name.removeprefix("rowwise"): value
            for name, value in planes.items()
            for direction in spec.quantizer.directions
            if value is not None
        }
    return GroupedTensor(spec, None, **planes)


def plane_names(spec: QuantizerSpec) -> tuple[list[str], list[str]]:
    """Names of a plain GroupedTensor's payloads and of their scales; shared planes appear once."""
    payloads = spec.directions[:1] if spec.shares_codes else spec.directions
    parts = ("_scale", "_global") if spec.scaling == "nvfp4" else ("_scale",)
    return [*payloads], [name + part for name in payloads for part in parts]


def plane_shape(spec: GroupedTensorSpec, plane: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a plain GroupedTensor's plane, by its name."""
    direction, _, part = plane.partition("_")
    if part == "global":
        return (spec.groups,), torch.float32
    if part == "scale":
        return spec.scale_shape(direction_name(direction)), SCALE_DTYPE[spec.quantizer.scale_format]
    return spec.payload_shape(direction_name(direction)), PAYLOAD_DTYPE[spec.quantizer.format]


def from_gathered(spec: GroupedTensorSpec, payloads: Sequence[Tensor], scales: Sequence[Tensor]) -> GroupedTensor:
    """The plain GroupedTensor of `spec` over gathered memory: payloads as bytes, scales of any shape.

    payloads, scales   in the order of plane_names
    """
    names, scale_names = plane_names(spec.quantizer)
    planes: dict[str, Tensor] = {}
    for name, value in zip(names, payloads, strict=True):
        shape, dtype = plane_shape(spec, name)
        planes[name] = value.view(dtype).view(shape)
    for name, value in zip(scale_names, scales, strict=True):
        planes[name] = value.view(plane_shape(spec, name)[0])
    return from_planes(spec, planes)


def planes_outside(tensor: GroupedTensor, gathered: Iterable[Tensor]) -> dict[str, Tensor]:
    """The planes of `tensor` that are not in the memory of `gathered`."""
    storages = {value.untyped_storage().data_ptr() for value in gathered}
    planes = {name: getattr(tensor, name) for name in PLANES}
    return {
        name: value
        for name, value in planes.items()
        if value is not None and value.untyped_storage().data_ptr() not in storages
    }


def refill(tensor: GroupedTensor, planes: Mapping[str, Tensor]) -> None:
    """Write `planes` into those of `tensor`, unseen by autograd: the values become again what they were before."""
    targets = {
        id(target): (target, value) for name, value in planes.items() if (target := getattr(tensor, name)) is not None
    }
    with _unsafe_preserve_version_counter(tuple(target for target, _ in targets.values())):
        for target, value in targets.values():
            target.copy_(value)
