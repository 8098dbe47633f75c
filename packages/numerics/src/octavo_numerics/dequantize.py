"""dequantize and valid: what a quantized tensor holds, and which of its elements mean something."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo import QuantizerSpec
from octavo.quantizer import Direction
from octavo_numerics import checks
from octavo_numerics.arrays import QuantizedArray
from octavo_numerics.casts import F32, decode
from octavo_numerics.groups import Groups, Units, units_of
from octavo_numerics.scales import canonical, e8m0_decode

Array = npt.NDArray[Any]


def _layout(q: QuantizedArray, direction: Direction) -> tuple[Groups, Units]:
    """(groups as the plane holds them, its scaling units)."""
    spec = q.spec
    layout = spec.rowwise_layout if direction == "rowwise" else spec.columnwise_layout
    if layout != "plain":
        raise ValueError(f"{direction}_layout={layout!r} is a backend's own; undo it to 'plain' first")
    *lead, rows, cols = spec.shape
    stacked = q.group_sizes is None
    groups = Groups(np.full(lead[0], rows, dtype=np.int64) if stacked else checks.check_sizes(q.group_sizes, rows))
    if direction == "columnwise" and spec.quantizer.hadamard:
        groups = groups.padded()
    return groups, units_of(spec.quantizer, direction, groups, cols)


def _trim(q: QuantizedArray, direction: Direction) -> tuple[Units, Array, Array, F32 | None]:
    """The plane's valid part, with rows of payload and of scales on one axis each."""
    groups, units = _layout(q, direction)
    payload, scale, factor = q.plane(direction)
    for name, array, shape in (
        (direction, payload, q.spec.payload_shape(direction)),
        (f"{direction}_scale", scale, q.spec.scale_shape(direction)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {list(array.shape)}; its spec says {list(shape)}")
    if q.spec.quantizer.scaling == "nvfp4" and (factor is None or factor.shape != (q.spec.groups,)):
        actual = "None" if factor is None else f"of shape {list(factor.shape)}"
        raise ValueError(
            f"{direction}_global is {actual}; nvfp4 needs one second-level factor per group, [{q.spec.groups}]"
        )
    payload = payload.reshape(math.prod(payload.shape[:-1]), units.cols)[: groups.rows]
    scale = scale.reshape(-1)[: math.prod(units.shape)].reshape(units.shape)
    return units, payload, scale, factor


@np.errstate(all="ignore")
def decode_plane(payload: Array, scale: Array, factor: F32 | None, spec: QuantizerSpec, units: Units) -> F32:
    """fp32 values [R, C] of codes [R, C] and compact scales: fl(code * scale), NVFP4's scale being fl(d * factor)."""
    return canonical(decode(payload, spec.format) * units.spread(scale_values(scale, factor, units)))


@np.errstate(all="ignore")
def scale_values(scale: Array, factor: F32 | None, units: Units) -> F32:
    """fp32 values of compact decode scales: E8M0's exponents, NVFP4's fl(d * factor), or fp32 scales as they are."""
    if factor is not None:
        values: F32 = decode(scale, "e4m3") * factor[units.rows.group][:, None]
        return values
    return e8m0_decode(scale) if scale.dtype == np.uint8 else scale


@np.errstate(all="ignore")
def dequantize(q: QuantizedArray, direction: Direction = "rowwise") -> F32:
    """fp32 values of one direction in the logical shape; rows past the sum are +0, every NaN is 0x7FC00000.

    Hadamard column data stay in the Hadamard domain and in their padded shape [block_bound(M, G, 16) * 16, K].
    """
    checks.check_subnormals()
    checks.check_direction(direction)
    units, payload, scale, factor = _trim(q, direction)
    values = decode_plane(payload, scale, factor, q.spec.quantizer, units)
    out = np.zeros(q.spec.payload_shape(direction), dtype=np.float32)
    out.reshape(-1)[: values.size] = values.reshape(-1)
    return out


def valid(q: QuantizedArray) -> dict[str, Array]:
    """Each plane that is present, cut down to the elements that mean something, by field name.

    Two tensors are equal where these arrays have equal bytes (NaN included). Stacked planes and [G] scales come
    whole; ragged ones lose rows past the sum and blocks that no group has.
    """
    out: dict[str, Array] = {}
    directions: tuple[Direction, ...] = ("rowwise", "columnwise")
    for direction in directions:
        if getattr(q, direction) is None:
            continue
        _, payload, scale, factor = _trim(q, direction)
        scale_shape = q.spec.scale_shape(direction)
        if q.group_sizes is None:
            payload, scale = payload.reshape(q.spec.payload_shape(direction)), scale.reshape(scale_shape)
        out[direction] = payload
        out[f"{direction}_scale"] = scale.reshape(scale.size) if len(scale_shape) == 1 else scale
        if factor is not None:
            out[f"{direction}_global"] = factor
    return out


def plane_sizes(q: QuantizedArray, direction: Direction = "rowwise") -> npt.NDArray[np.int64]:
    """[G]: rows that each group has in a plane's payload; Hadamard column data pad them to multiples of 16."""
    return _layout(q, checks.check_direction(direction))[0].sizes
