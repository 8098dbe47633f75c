"""`Bound.run` of a "dequantize" request."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from octavo import GroupedTensorSpec
from octavo.formats import DType
from octavo.quantizer import Direction
from octavo_jax import GroupedTensor
from octavo_jax_native import arguments
from octavo_jax_native.calls import dequantize_call, make_plan
from octavo_jax_native.planes import Extent, array, plane_results


def bind_dequantize(out_dtype: DType) -> Callable[..., Array]:
    """The function that gives the values of one plane in `out_dtype`."""
    dtype = jnp.dtype(out_dtype)

    def octavo_dequantize(
        planes: dict[str, Array], group_sizes: Array | None, spec: GroupedTensorSpec, direction: Direction
    ) -> Array:
        extent = Extent.of(spec.shape, spec.groups)
        layout = spec.rowwise_layout if direction == "rowwise" else spec.columnwise_layout
        operands = dict(planes)
        if group_sizes is not None:
            operands["plan"] = make_plan(group_sizes, extent.rows)
        out = array(spec.payload_shape(direction), dtype)
        return dequantize_call(spec.quantizer, operands, out, direction=direction, layout=layout, extent=extent)

    compiled = jax.jit(octavo_dequantize, static_argnames=("spec", "direction"))

    def run(q: GroupedTensor, direction: Direction = "rowwise") -> Array:
        spec = q.spec
        codes, scales, second = q.plane(direction)
        layout = spec.rowwise_layout if direction == "rowwise" else spec.columnwise_layout
        if spec.ragged_axis == 0:
            arguments.check_sizes(q.group_sizes)
        expected = plane_results(spec.quantizer, direction, layout, Extent.of(spec.shape, spec.groups))
        given = {"codes": codes, "scales": scales, "global": second}
        planes = {}
        for result in expected:
            name = result.split("_")[1]
            field = direction if name == "codes" else f"{direction}_{name.removesuffix('s')}"
            arguments.check_array(given[name], field, expected[result].shape, expected[result].dtype)
            planes[name] = given[name]
        return compiled(planes, q.group_sizes, spec=spec, direction=direction)  # type: ignore[no-any-return]

    return run
