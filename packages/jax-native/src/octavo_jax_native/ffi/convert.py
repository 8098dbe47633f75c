"""The custom calls that read one plane of a quantized operand: its values, or its codes in the other layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import octavo_native
from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.quantizer import Direction
from octavo_jax_native.arrays.planes import Extent, layout_number, values_plane
from octavo_jax_native.ffi import targets
from octavo_jax_native.ffi.custom_call import CPU_THREADS, Results, call


@dataclass(frozen=True)
class PlaneCall:
    """A call that reads the plane of one direction of a tensor; operands by name, as in native/lib/bindings."""

    quantizer: QuantizerSpec
    extent: Extent
    direction: Direction

    @classmethod
    def of(cls, spec: GroupedTensorSpec, direction: Direction) -> PlaneCall:
        """The call for a tensor of this spec."""
        return cls(spec.quantizer, Extent.of(spec.shape, spec.groups), direction)

    def _attributes(self, operands: Mapping[str, Array]) -> dict[str, Any]:
        quantizer, extent = self.quantizer, self.extent
        return {
            "operands": ",".join(operands),
            "format": octavo_native.FORMATS[quantizer.format],
            "scaling": octavo_native.SCALINGS[quantizer.scaling],
            "square": quantizer.square_in(self.direction),
            "hadamard": quantizer.hadamard,
            "direction": octavo_native.DIRECTIONS[self.direction],
            "rows": extent.rows,
            "cols": extent.cols,
            "groups": extent.groups,
            "matrix_rows": extent.matrix_rows,
            "threads": CPU_THREADS,
        }

    def dequantize(self, operands: Mapping[str, Array], out: jax.ShapeDtypeStruct, layout: str) -> Array:
        """The values of the plane, which is in `layout` (ffi/dequantize.cpp)."""
        attributes = self._attributes(operands) | {"layout": layout_number(layout), "out_layout": 0}
        return call(targets.DEQUANTIZE, {"out": out}, operands, attributes)[0]

    def values(self, operands: Mapping[str, Array]) -> Array:
        """The plane of values (octavo_native.layouts) of codes in the native layout, which need no second level."""
        operands = dict(operands)
        if self.quantizer.scaling == "nvfp4":
            operands["global"] = jnp.ones(self.extent.groups, jnp.float32)
        out = values_plane(self.direction, self.extent)
        attributes = self._attributes(operands) | {"layout": 1, "out_layout": int(self.direction == "columnwise")}
        return call(targets.DEQUANTIZE, {"out": out}, operands, attributes)[0]

    def convert(self, operands: Mapping[str, Array], results: Results, layout: str) -> list[Array]:
        """Codes and scales in `layout`, from those in the other one (ffi/convert.cpp)."""
        attributes = self._attributes(operands) | {"results": ",".join(results), "to": layout_number(layout)}
        return call(targets.CONVERT, results, operands, attributes)
