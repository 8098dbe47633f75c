"""The planes of a weight on their way through FSDP2: named, put together again, refilled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo_torch.arithmetic.casts import FP8_DTYPE
from octavo_torch.arrays.grouped_tensor import PLANES, GroupedTensor
from octavo_torch.quantizers.arguments import direction_name

_SCALE_DTYPE = {"fp32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


def of_planes(spec: GroupedTensorSpec, made: dict[str, Any]) -> GroupedTensor:
    """A plain GroupedTensor of stacked matrices; shared codes stand in both directions."""
    if spec.quantizer.shares_codes:
        made = {
            direction + name.removeprefix("rowwise"): value
            for name, value in made.items()
            for direction in spec.quantizer.directions
            if value is not None
        }
    return GroupedTensor(spec, None, **made)


def planes_of(spec: QuantizerSpec) -> tuple[list[str], list[str]]:
    """Names of a plain GroupedTensor's payloads and of their scales; shared ones once."""
    own = spec.directions[:1] if spec.shares_codes else spec.directions
    parts = ("_scale", "_global") if spec.scaling == "nvfp4" else ("_scale",)
    return [*own], [name + part for name in own for part in parts]


def whole_of(spec: GroupedTensorSpec, payloads: Sequence[Tensor], scales: Sequence[Tensor]) -> GroupedTensor:
    """The plain GroupedTensor of `spec` over gathered memory: bytes of the payloads, scales of any shape.

    payloads, scales   in the order of planes_of
    """
    names, scale_names = planes_of(spec.quantizer)
    made: dict[str, Any] = {}
    for name, value in zip(names, payloads, strict=True):
        made[name] = value.view(FP8_DTYPE.get(spec.quantizer.format, torch.uint8)).view(
            spec.payload_shape(direction_name(name))
        )
    for name, value in zip(scale_names, scales, strict=True):
        direction, part = name.rsplit("_", 1)
        shape = spec.scale_shape(direction_name(direction)) if part == "scale" else (spec.groups,)
        made[name] = value.view(shape)
    return of_planes(spec, made)


def beside(tensor: GroupedTensor, gathered: Iterable[Tensor]) -> dict[str, Tensor]:
    """The planes of `tensor` that are not in the memory of `gathered`."""
    known = {value.untyped_storage().data_ptr() for value in gathered}
    planes = {name: getattr(tensor, name) for name in PLANES}
    return {
        name: value
        for name, value in planes.items()
        if value is not None and value.untyped_storage().data_ptr() not in known
    }


def refill(tensor: GroupedTensor, planes: Mapping[str, Tensor]) -> None:
    """Write `planes` into those of `tensor`, whose values come back as they were: for autograd nothing has changed."""
    targets = {
        id(target): (target, value) for name, value in planes.items() if (target := getattr(tensor, name)) is not None
    }
    with _unsafe_preserve_version_counter(tuple(target for target, _ in targets.values())):
        for target, value in targets.values():
            target.copy_(value)
