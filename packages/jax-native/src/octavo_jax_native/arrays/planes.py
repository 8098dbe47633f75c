"""The planes of a quantized operand: the arrays that a call makes of them, and the GroupedTensor that holds these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction
from octavo_jax.plugin_api import PAYLOAD_DTYPE, SCALE_DTYPE, GroupedTensor
from octavo_native import layouts

_Plane = tuple[Array | None, Array | None, Array | None]
_NO_PLANE: _Plane = (None, None, None)

PREFIX: dict[Direction, str] = {"rowwise": "row", "columnwise": "col"}
"""What the names of a plane's results begin with."""

NATIVE: dict[Direction, str] = {"rowwise": layouts.NATIVE_ROWS, "columnwise": layouts.NATIVE_COLUMNS}
"""The layout of each direction that the Hopper kernels read."""


@dataclass(frozen=True)
class Extent:
    """The size of an operand: ragged [rows, cols] with matrix_rows 0, or stacked [groups, matrix_rows, cols]."""

    rows: int
    cols: int
    groups: int
    matrix_rows: int = 0

    @classmethod
    def of(cls, shape: tuple[int, ...], groups: int) -> Extent:
        """The extent of an array [M, C] or [G, N, C]."""
        if len(shape) == 2:
            return cls(shape[0], shape[1], groups)
        return cls(shape[0] * shape[1], shape[2], groups, shape[1])


def result_array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array that a call makes."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def layout_number(layout: str) -> int:
    """The layout as the kernels' attribute: 0 plain, 1 native, 2 values."""
    return 0 if layout == PLAIN else 2 if layout == layouts.VALUES else 1


def values_plane(direction: Direction, extent: Extent) -> jax.ShapeDtypeStruct:
    """The array of a plane of values."""
    shape = layouts.values_shape(
        direction=direction, rows=extent.rows, cols=extent.cols, groups=extent.groups, matrix_rows=extent.matrix_rows
    )
    return result_array(shape, jnp.bfloat16)


def plane_results(
    spec: QuantizerSpec, direction: Direction, layout: str, extent: Extent
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of one plane, under the names of a call's results; values take the place of codes, without scales."""
    prefix = PREFIX[direction]
    second = {f"{prefix}_global": result_array((extent.groups,), jnp.float32)} if spec.scaling == "nvfp4" else {}
    if layout == layouts.VALUES:
        return {f"{prefix}_codes": values_plane(direction, extent), **second}
    how: dict[str, Any] = {
        "format": spec.format,
        "scaling": spec.scaling,
        "layout": layout,
        "direction": direction,
        "rows": extent.rows,
        "cols": extent.cols,
        "groups": extent.groups,
        "matrix_rows": extent.matrix_rows,
        "square": spec.square_in(direction),
        "hadamard": spec.hadamard,
    }
    return {
        f"{prefix}_codes": result_array(layouts.codes_shape(**how), PAYLOAD_DTYPE[spec.format]),
        f"{prefix}_scales": result_array(layouts.scales_shape(**how), SCALE_DTYPE[spec.scale_format]),
        **second,
    }


def calls_for(spec: QuantizerSpec, wanted: tuple[str, str]) -> tuple[tuple[tuple[Direction, str], ...], ...]:
    """The planes that each call makes, as (direction, layout), for the wanted (rowwise, columnwise) layouts.

    One call makes both planes. Plain column data that share the row codes are the plain row plane itself; only where
    that is wanted beside row data in the native layout is there a second call.
    """
    layout = dict(zip(("rowwise", "columnwise"), wanted, strict=True))
    planes: list[tuple[Direction, str]] = [(direction, layout[direction]) for direction in spec.directions]
    if not spec.shares_codes or layout["columnwise"] != PLAIN or "columnwise" not in spec.directions:
        return (tuple(planes),)
    plain: tuple[Direction, str] = ("rowwise", PLAIN)
    if planes[0] in (plain, ("columnwise", PLAIN)):
        return ((plain,),)
    return ((planes[0],), (plain,))


def tensor_of(
    spec: GroupedTensorSpec, group_sizes: Array | None, made: tuple[Mapping[str, Array], ...]
) -> GroupedTensor:
    """The GroupedTensor of the results of `calls_for`'s calls; shared codes are one array in both planes."""
    quantizer = spec.quantizer
    row = _fields(made[0], "row") if "rowwise" in quantizer.directions else _NO_PLANE
    column = _NO_PLANE
    if "columnwise" in quantizer.directions:
        last = made[-1]
        column = _fields(last, "col" if "col_codes" in last else "row")
    return GroupedTensor(spec, group_sizes, row[0], row[1], row[2], column[0], column[1], column[2])


def _fields(made: Mapping[str, Array], prefix: str) -> _Plane:
    return made[f"{prefix}_codes"], made[f"{prefix}_scales"], made.get(f"{prefix}_global")
