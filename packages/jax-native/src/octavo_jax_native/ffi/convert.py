"""The custom calls that read one plane of a quantized operand: its values, or its codes in the other layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

import octavo_native
from octavo import GroupedTensorSpec
from octavo.quantizer import Direction
from octavo_jax_native.arrays.planes import Extent, layout_number
from octavo_jax_native.ffi import targets
from octavo_jax_native.ffi.custom_call import CPU_THREADS, Results, call


@dataclass(frozen=True)
class PlaneCall:
    """A call that reads the plane of one direction of a tensor; operands by name, as in native/lib/bindings."""

    spec: GroupedTensorSpec
    direction: Direction

    def _attributes(self, operands: Mapping[str, Array]) -> dict[str, Any]:
        quantizer, extent = self.spec.quantizer, Extent.of(self.spec.shape, self.spec.groups)
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

    def convert(self, operands: Mapping[str, Array], results: Results, layout: str) -> list[Array]:
        """Codes and scales in `layout`, from those in the other one (ffi/convert.cpp)."""
        attributes = self._attributes(operands) | {"results": ",".join(results), "to": layout_number(layout)}
        return call(targets.CONVERT, results, operands, attributes)
