"""Dequantizer: codes back to values; and `converted`: planes from one layout to another."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction
from octavo_native.layouts import LAYOUTS_OF_DIRECTION
from octavo_torch.plugin_api import GroupedTensor, quantizer_text
from octavo_torch_native.arrays.group_index import GroupIndex, group_index_of
from octavo_torch_native.arrays.layouts import layout_of
from octavo_torch_native.quantizers import operators
from octavo_torch_native.quantizers.planes import check_plane, plane_sizes


class Dequantizer:
    """The bound function of a "dequantize" request: values of `dtype` in the logical shape, zeros past the sum."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def __call__(self, q: GroupedTensor, direction: Direction = "rowwise") -> Tensor:
        """Hadamard column data stay in the Hadamard domain, [block_bound(M, G, 16) * 16, K]."""
        codes, scale, factor = q.plane(direction)
        spec = q.spec
        text = quantizer_text(spec.quantizer)
        layout = layout_of(spec, direction)
        _check(spec, direction, codes, scale, factor)
        index = group_index_of(spec.shape, q.group_sizes, codes)
        _check_groups(spec, index)
        words = None if index is None else index.words
        value: Tensor = operators.dequantize(
            codes, scale, factor, words, text, list(spec.shape), spec.groups, direction, layout, self._dtype
        )
        return value


def _check(spec: GroupedTensorSpec, direction: Direction, codes: Tensor, scale: Tensor, factor: Tensor | None) -> None:
    sizes = plane_sizes(spec, direction, layout_of(spec, direction))
    check_plane(f"q's {direction} plane", sizes, spec.groups, codes, scale, factor)


def _check_groups(spec: GroupedTensorSpec, index: GroupIndex | None) -> None:
    if index is not None and index.groups != spec.groups:
        raise ValueError(f"q has {index.groups} group sizes and {spec.groups} groups; give one size per group")


def _same_bytes(spec: QuantizerSpec, direction: Direction) -> bool:
    """True where the plain and the native layout of a plane differ in name alone."""
    turned = spec.scaling == "block" and not spec.square
    return direction == "rowwise" and spec.format != "e2m1" and not turned


def converted(q: GroupedTensor, layouts: tuple[str, str]) -> GroupedTensor:
    """`q` in the (rowwise, columnwise) layouts; planes that have theirs already are shared with it."""
    spec = q.spec
    text = quantizer_text(spec.quantizer)
    planes: dict[str, Tensor] = {}
    index: GroupIndex | None = None
    chosen = {}
    for (direction, known), layout in zip(LAYOUTS_OF_DIRECTION.items(), layouts, strict=True):
        if direction not in spec.quantizer.directions:
            chosen[direction] = PLAIN
            continue
        if layout not in known:
            raise ValueError(f"layouts has {layout!r} for {direction} data; give {' or '.join(map(repr, known))}")
        chosen[direction] = layout
        codes, scale, factor = q.plane(direction)
        _check(spec, direction, codes, scale, factor)
        if layout_of(spec, direction) != layout and not _same_bytes(spec.quantizer, direction):
            if index is None:
                index = group_index_of(spec.shape, q.group_sizes, codes)
                _check_groups(spec, index)
            words = None if index is None else index.words
            codes, scale = operators.convert(
                codes, scale, words, text, list(spec.shape), spec.groups, direction, layout
            )
        planes |= {direction: codes, f"{direction}_scale": scale}
        if factor is not None:
            planes[f"{direction}_global"] = factor
    into = GroupedTensorSpec(
        **{**dict(spec), "rowwise_layout": chosen["rowwise"], "columnwise_layout": chosen["columnwise"]}
    )
    if spec.quantizer.shares_codes and spec.orientation == "both" and set(chosen.values()) == {PLAIN}:
        rows = {name: plane for name, plane in planes.items() if name.startswith("rowwise")}
        planes |= {name.replace("rowwise", "columnwise"): plane for name, plane in rows.items()}
    return GroupedTensor(into, q.group_sizes, **planes)
