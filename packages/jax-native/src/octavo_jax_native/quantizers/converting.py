"""Planes of the plain layout made native, for a GEMM whose operand came from elsewhere."""

from __future__ import annotations

from jax import Array

from octavo import GroupedTensorSpec
from octavo.quantizer import Direction
from octavo_jax_native.arrays.planes import NATIVE, PREFIX, Extent, plane_results
from octavo_jax_native.arrays.tensors import layout_of
from octavo_jax_native.ffi.calls import convert_call


def native_plane(
    planes: dict[str, Array], spec: GroupedTensorSpec, direction: Direction, plan: Array
) -> dict[str, Array]:
    """Codes, scales and second level of one plane in the layout that GEMMs read, whichever it has.

    plan   of the tensor's group sizes; stacked matrices do without
    """
    if layout_of(spec, direction) == NATIVE[direction]:
        return planes
    extent = Extent.of(spec.shape, spec.groups)
    wanted = plane_results(spec.quantizer, direction, NATIVE[direction], extent)
    results = {name: wanted[f"{PREFIX[direction]}_{name}"] for name in ("codes", "scales")}
    operands = {name: planes[name] for name in results}
    if spec.ragged_axis == 0:
        operands["plan"] = plan
    made = convert_call(spec.quantizer, operands, results, direction=direction, layout=NATIVE[direction], extent=extent)
    # The second level is the same array in both layouts.
    return {**planes, **dict(zip(results, made, strict=True))}
