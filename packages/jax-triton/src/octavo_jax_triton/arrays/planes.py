"""The planes of an operand as JAX arrays: dtypes, what a quantizer makes, and the GroupedTensor of it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from octavo import GroupedTensorSpec
from octavo.quantizer import Direction
from octavo_jax.plugin_api import PAYLOAD_DTYPE, SCALE_DTYPE, GroupedTensor, check_array
from octavo_jax_triton.launch.arguments import Made
from octavo_triton.layouts import TURNED, output_names, turned_shape, with_shared

Plane = tuple[Array, Array, Array | None]


def results_of(layout: GroupedTensorSpec) -> dict[str, Made]:
    """What a quantizer makes, by name."""
    return {name: _made(layout, name) for name in output_names(layout)}


def _made(layout: GroupedTensorSpec, name: str) -> Made:
    spec = layout.quantizer
    direction: Direction = "rowwise" if name.startswith("rowwise") else "columnwise"
    if name.endswith("_global"):
        return Made(name, (layout.groups,), jnp.float32)
    if name.endswith("_scale"):
        return Made(name, layout.scale_shape(direction), SCALE_DTYPE[spec.scale_format])
    turned = direction == "columnwise" and layout.columnwise_layout == TURNED
    return Made(name, turned_shape(layout) if turned else layout.payload_shape(direction), PAYLOAD_DTYPE[spec.format])


def assembled(layout: GroupedTensorSpec, group_sizes: Array | None, made: dict[str, Array]) -> GroupedTensor:
    """The GroupedTensor of a quantizer's results; shared codes are one array in both planes."""
    planes: dict[str, Any] = with_shared(layout.quantizer, dict(made))
    return GroupedTensor(layout, group_sizes, **planes)


def checked_plane(q: GroupedTensor, direction: Direction, name: str = "") -> Plane:
    """Codes, scales and second level of one direction; ValueError where one has not the shape that its spec gives."""
    layout, plane = q.spec, q.plane(direction)
    for part, array in zip(("", "_scale", "_global"), plane, strict=True):
        if part != "_global" or layout.quantizer.scaling == "nvfp4":
            made = _made(layout, direction + part)
            check_array(array, name + direction + part, made.shape, made.dtype)
    return plane
