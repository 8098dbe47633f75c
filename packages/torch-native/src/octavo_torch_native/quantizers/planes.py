"""The planes of codes in octavo_native's terms: shapes, dtypes, and the numbers that stand for names."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

import octavo_native
from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction, Operand
from octavo_native import layouts as native_layouts
from octavo_torch.plugin_api import DTYPE_NAMES, PAYLOAD_DTYPE, SCALE_DTYPE, dtype_text, quantizer_from

Shape = tuple[int, ...]

DTYPE_NUMBERS: dict[torch.dtype, int] = {dtype: octavo_native.DTYPES[name] for dtype, name in DTYPE_NAMES.items()}
"""octavo_native's number of each high-precision dtype."""
PREFIX: dict[Direction, str] = {"rowwise": "row", "columnwise": "col"}
"""How octavo_native's names of a plane's arrays begin."""


def native_quantizer(spec: QuantizerSpec, operand: Operand) -> octavo_native.Quantizer:
    """The spec in octavo_native's numbers."""
    return octavo_native.Quantizer(
        format=octavo_native.FORMATS[spec.format],
        scaling=octavo_native.SCALINGS[spec.scaling],
        operand=octavo_native.OPERANDS[operand],
        square=spec.square,
        stochastic=spec.stochastic,
        hadamard=spec.hadamard,
        power_of_two=spec.power_of_two,
        amax_epsilon=spec.amax_epsilon,
        mxfp4=None if spec.mxfp4 is None else octavo_native.DIRECTIONS[spec.mxfp4],
        square_columns=spec.square_columns,
    )


@lru_cache(maxsize=256)
def quantizer_of(text: str) -> octavo_native.Quantizer:
    """The spec of this text in octavo_native's numbers, to dequantize and convert its planes."""
    spec = quantizer_from(text)
    return native_quantizer(spec, spec.role)


def layout_number(layout: str) -> int:
    """A layout's name in octavo_native's numbers."""
    name = layout if layout in (PLAIN, native_layouts.VALUES) else "native"
    number: int = octavo_native.LAYOUTS[name]
    return number


def plane_shapes(spec: GroupedTensorSpec, direction: Direction, layout: str) -> tuple[Shape, Shape]:
    """Shapes of a plane's codes and scales in this layout."""
    if layout == PLAIN:
        return spec.payload_shape(direction), spec.scale_shape(direction)
    return native_shapes(spec.quantizer, spec.shape, spec.groups, direction, layout)


def native_shapes(
    quantizer: QuantizerSpec, shape: Shape, groups: int, direction: Direction, layout: str
) -> tuple[Shape, Shape]:
    """Shapes of a plane's codes and scales in this native layout."""
    of_plane: dict[str, Any] = {
        "format": quantizer.format,
        "scaling": quantizer.scaling,
        "square": quantizer.square_in(direction),
        "hadamard": quantizer.hadamard,
        "layout": layout,
        "direction": direction,
        "groups": groups,
        **geometry(shape),
    }
    return native_layouts.codes_shape(**of_plane), native_layouts.scales_shape(**of_plane)


def geometry(shape: Shape) -> dict[str, int]:
    """rows, cols and matrix_rows of an operand of this shape, as octavo_native counts them."""
    if len(shape) == 2:
        return {"rows": shape[0], "cols": shape[1], "matrix_rows": 0}
    groups, rows, cols = shape
    return {"rows": groups * rows, "cols": cols, "matrix_rows": rows}


PlaneSizes = tuple[int, int, torch.dtype, torch.dtype]
"""Elements of a plane's codes, elements of its scales, and the dtypes of both. Values have no scales."""

VALUE_DTYPE = torch.bfloat16
"""Of a plane of values."""


def plane_sizes(spec: GroupedTensorSpec, direction: Direction, layout: str) -> PlaneSizes:
    """The sizes that kernels, which get nothing but addresses, expect of a plane in this layout."""
    if layout == native_layouts.VALUES:
        values = native_layouts.values_shape(direction=direction, groups=spec.groups, **geometry(spec.shape))
        return prod(values), 0, VALUE_DTYPE, SCALE_DTYPE[spec.quantizer.scale_format]
    codes, scales = plane_shapes(spec, direction, layout)
    return prod(codes), prod(scales), PAYLOAD_DTYPE[spec.quantizer.format], SCALE_DTYPE[spec.quantizer.scale_format]


def check_plane(
    of: str, sizes: PlaneSizes, groups: int, codes: Tensor, scale: Tensor | None, factor: Tensor | None
) -> None:
    """ValueError for tensors that do not have what the spec of the operand `of` says: kernels would read beyond."""
    count, scales, code_dtype, scale_dtype = sizes
    device = codes.device
    if (
        codes.numel() == count
        and codes.dtype is code_dtype
        and (
            not scales
            if scale is None
            else scale.numel() == scales and scale.dtype is scale_dtype and scale.device == device
        )
        and (factor is None or (factor.numel() == groups and factor.dtype is torch.float32 and factor.device == device))
    ):
        return
    given = [
        "none" if value is None else f"{dtype_text(value.dtype)} {list(value.shape)} on {value.device}"
        for value in (codes, scale, factor)
    ]
    raise ValueError(
        f"{of} has codes {given[0]}, scales {given[1]} and second-level factors {given[2]}, and its spec says {count} "
        f"codes in {dtype_text(code_dtype)}, {scales} scales in {dtype_text(scale_dtype)} and {groups} groups, all on "
        "one device; give the tensors that its quantizer made"
    )
