"""Planes of the plain layout converted for a GEMM whose operand another backend has quantized."""

from __future__ import annotations

from jax import Array

from octavo import GroupedTensorSpec
from octavo.quantizer import Direction
from octavo_jax_native.arrays.checked_plane import layout_of
from octavo_jax_native.arrays.planes import NATIVE, PREFIX, Extent, plane_results
from octavo_jax_native.ffi.convert import PlaneCall
from octavo_native.layouts import VALUES


def native_plane(
    planes: dict[str, Array], spec: GroupedTensorSpec, direction: Direction, plan: Array
) -> dict[str, Array]:
    """Codes, scales and second level of one plane in the layout that GEMMs read, whichever it has; values as they are.

    plan   of the tensor's group sizes; stacked matrices do without
    """
    layout = NATIVE[direction]
    if layout_of(spec, direction) in (layout, VALUES):
        return planes
    native = plane_results(spec.quantizer, direction, layout, Extent.of(spec.shape, spec.groups))
    results = {name: native[f"{PREFIX[direction]}_{name}"] for name in ("codes", "scales")}
    operands = {name: planes[name] for name in results}
    if spec.ragged_axis == 0:
        operands["plan"] = plan
    converted = PlaneCall.of(spec, direction).convert(operands, results, layout)
    # The second level is the same array in both layouts.
    return {**planes, **dict(zip(results, converted, strict=True))}
