"""The arrays of one plane of a GroupedTensor, held against what its spec says."""

from __future__ import annotations

from typing import Any

from jax import Array

from octavo import GroupedTensorSpec
from octavo.quantizer import Direction
from octavo_jax.plugin_api import GroupedTensor, check_array
from octavo_jax_native.arrays.planes import Extent, plane_results
from octavo_native.layouts import VALUES


def layout_of(spec: GroupedTensorSpec, direction: Direction) -> str:
    """The layout of one plane."""
    return spec.rowwise_layout if direction == "rowwise" else spec.columnwise_layout


def checked_plane(q: GroupedTensor, direction: Direction, where: str = "") -> dict[str, Array]:
    """Codes, or values without scales, and for NVFP4 the second level, by the names of a call's operands.

    where   put before an array's name in errors, such as "x."

    ValueError where the plane was not made, or has another shape or dtype than the spec's quantizer and layout give.
    """
    spec = q.spec
    layout = layout_of(spec, direction)
    codes, scales, second = _values(q, direction) if layout == VALUES else q.plane(direction)
    expected = plane_results(spec.quantizer, direction, layout, Extent.of(spec.shape, spec.groups))
    given: dict[str, Any] = {"codes": codes, "scales": scales, "global": second}
    planes = {}
    for result in expected:
        name = result.split("_")[1]
        field = direction if name == "codes" else f"{direction}_{name.removesuffix('s')}"
        check_array(given[name], where + field, expected[result].shape, expected[result].dtype)
        planes[name] = given[name]
    return planes


def _values(q: GroupedTensor, direction: Direction) -> tuple[Array | None, None, Array | None]:
    """A plane of values, which has no scales."""
    if direction == "rowwise":
        return q.rowwise, None, q.rowwise_global
    return q.columnwise, None, q.columnwise_global
