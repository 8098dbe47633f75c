"""The planes of an operand as JAX arrays: dtypes, what a quantizer makes, and the GroupedTensor of it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from octavo import GroupedTensorSpec
from octavo.quantizer import Direction
from octavo_jax.plugin_api import PAYLOAD_DTYPE, SCALE_DTYPE, GroupedTensor, check_array
from octavo_jax_triton.launch.arguments import Output
from octavo_triton.layouts import TURNED, output_names, turned_shape, with_shared

Plane = tuple[Array, Array, Array | None]


def plane_outputs(spec: GroupedTensorSpec) -> dict[str, Output]:
    """The arrays that a quantizer makes of an operand of this spec, by name."""
    return {name: _output(spec, name) for name in output_names(spec)}


def _output(spec: GroupedTensorSpec, name: str) -> Output:
    quantizer = spec.quantizer
    direction: Direction = "rowwise" if name.startswith("rowwise") else "columnwise"
    if name.endswith("_global"):
        return Output(name, (spec.groups,), jnp.float32)
    if name.endswith("_scale"):
        return Output(name, spec.scale_shape(direction), SCALE_DTYPE[quantizer.scale_format])
    turned = direction == "columnwise" and spec.columnwise_layout == TURNED
    return Output(
        name, turned_shape(spec) if turned else spec.payload_shape(direction), PAYLOAD_DTYPE[quantizer.format]
    )


def tensor_of(spec: GroupedTensorSpec, group_sizes: Array | None, results: dict[str, Array]) -> GroupedTensor:
    """The GroupedTensor of a quantizer's results; shared codes are one array in both planes."""
    planes: dict[str, Any] = with_shared(spec.quantizer, dict(results))
    return GroupedTensor(spec, group_sizes, **planes)


def checked_plane(q: GroupedTensor, direction: Direction, name: str = "") -> Plane:
    """Codes, scales and second level of one direction; ValueError where one has not the shape that its spec gives."""
    spec, plane = q.spec, q.plane(direction)
    for part, array in zip(("", "_scale", "_global"), plane, strict=True):
        if part != "_global" or spec.quantizer.scaling == "nvfp4":
            output = _output(spec, direction + part)
            check_array(array, name + direction + part, output.shape, output.dtype)
    return plane
