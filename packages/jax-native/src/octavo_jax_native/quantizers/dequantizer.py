"""The function of a "dequantize" request."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from octavo import GroupedTensorSpec
from octavo.formats import DType
from octavo.quantizer import Direction
from octavo_jax.plugin_api import GroupedTensor, check_groups
from octavo_jax_native.arrays.checked_plane import checked_plane, layout_of
from octavo_jax_native.arrays.planes import result_array
from octavo_jax_native.ffi.convert import PlaneCall
from octavo_jax_native.ffi.custom_call import group_plan
from octavo_registry.contract import Dequantize


def bind_dequantize(out_dtype: DType) -> Dequantize[GroupedTensor, Array]:
    """The function that gives the values of one plane in `out_dtype`."""
    dtype = jnp.dtype(out_dtype)

    def octavo_dequantize(
        planes: dict[str, Array], group_sizes: Array | None, spec: GroupedTensorSpec, direction: Direction
    ) -> Array:
        operands = dict(planes)
        if group_sizes is not None:
            operands["plan"] = group_plan(group_sizes, spec.shape[0])
        out = result_array(spec.payload_shape(direction), dtype)
        return PlaneCall.of(spec, direction).dequantize(operands, out, layout_of(spec, direction))

    compiled = jax.jit(octavo_dequantize, static_argnames=("spec", "direction"))

    def run(q: GroupedTensor, direction: Direction = "rowwise") -> Array:
        check_groups(q)
        planes = checked_plane(q, direction)
        return compiled(planes, q.group_sizes, spec=q.spec, direction=direction)  # type: ignore[no-any-return]

    return run
