"""dequantize and valid: what a quantized tensor holds, and which of its elements mean something; how far the operands
of MXFP8 with folded products may lie from the MX values that they stand for.

The folded operand (`MXFP8(products="folded")`) is that of `BlockScaling` with power-of-two scales: one scale for 1x128
elements, 128x128 of weights, in which the blocks of 32 lie whole, whichever way the planes run and wherever a group or
a matrix ends. It is made from the input, not from MX codes, so nothing is rounded twice.

Scales. For every finite fp32 amax but two the rule of blocks, fl(1 / s) with s = fl(max / amax) without its mantissa,
gives the decode scale of the E8M0 rule (compared for all 2^31 - 2^24 of them). Of 0 it gives 1 instead of 2^-127, and
codes are zeros under both. Of 0x04600001 in E4M3, 0x07E00001 in E5M2, fl(amax fl(1 / max)) loses the last bit: E8M0
saturates that amax at 2^-127, and blocks take 2^-126. Both rules rise with amax, so a folded scale is at least each of
the MX scales that are folded into it.

Values. Let s be the folded scale and m <= s the MX one, both powers of two, p the format's mantissa bits (3 of E4M3,
2 of E5M2) and t = 2^e its least normal number (2^-6, 2^-14). Nothing saturates but for that one amax, which rounds
down to the same value under both scales.
- |x| >= t s: x is normal under both scales, the spacing of the codes follows from x's exponent alone, and so both give
  the same value.
- |x| < t s: the folded value is the nearest multiple of the spacing 2^(e-p) s. Where m = s, so is the MX value. Else
  every multiple of half of that spacing is a value of the MX code there, and a rounding to nearest moves no x across a
  value that it can represent: the MX value lies between the midpoints around the folded one, so that
  |folded - MX| <= 2^(e-p-1) s, which is 2^-10 s for E4M3 and 2^-17 s for E5M2. The folded value is t s at most.
Since s < 2 amax / max where s is not the least scale 2^-127 (and there m = s), that is less than 2^-9 / 448 = 4.4e-6 of
the block's amax (E5M2: 2^-16 / 57344 = 2.7e-10).

The operands of `MXFP4Weights` hold MXFP4's values in the same blocks (octavo_numerics.mxfp4 derives which of them
exactly). With the spacing u = 2^-9 s of E4M3's subnormal codes, what differs is 1.5 u, which becomes 2 u, and values
below u, which become u or 0: by half of u at most, and only where the code's value is 2 u or less.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo import QuantizerSpec
from octavo.formats import Format
from octavo.quantizer import Direction
from octavo_numerics import checks
from octavo_numerics.arrays import QuantizedArray
from octavo_numerics.casts import F32, decode
from octavo_numerics.groups import Groups, Units, units_of
from octavo_numerics.scales import canonical, e8m0_decode

Array = npt.NDArray[Any]

_LEAST_NORMAL: dict[Format, float] = {"e4m3": 2.0**-6, "e5m2": 2.0**-14}
_HALF_OF_SPACING: dict[Format, float] = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}
"""Half of the distance between subnormal codes."""


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


def folding_bound(q: QuantizedArray, direction: Direction = "rowwise") -> npt.NDArray[np.float64]:
    """The largest |folded - MX| of each element, in the shape that `dequantize` gives; 0 in rows past the sum.

    q   an operand quantized as `MXFP8(products="folded").quantizer(...)` says: blocks with power-of-two scales; or as
        `MXFP4Weights().quantizer("w")` does, where MX is MXFP4. Columns of `BlockScaling(square_columns=True)` stand
        for those with a scale for each of them, whose scales are the same powers of two

    The module derives it. Where a block holds a NaN or an infinity the folded values are NaN, four MX blocks of which
    need not be, and the bound is infinite. Raises ValueError for other quantizers and for a plane that is not there.
    """
    checks.check_direction(direction)
    spec = q.spec.quantizer
    if spec.scaling != "block" or not spec.power_of_two or spec.amax_epsilon:
        raise ValueError(
            f"q has scaling={spec.scaling!r}, power_of_two={spec.power_of_two}, amax_epsilon={spec.amax_epsilon!r}; "
            "give an operand of blocks with power-of-two scales and no epsilon, as "
            "MXFP8(products='folded').quantizer('x') makes"
        )
    units, payload, scale, factor = _trim(q, direction)
    values = np.abs(decode_plane(payload, scale, factor, spec, units).astype(np.float64))
    scales = units.spread(scale).astype(np.float64)
    half = _HALF_OF_SPACING[spec.format]
    least = 4 * half if spec.mxfp4 else _LEAST_NORMAL[spec.format]
    bound = np.where(values <= least * scales, half * scales, 0.0)
    bound[np.isnan(values)] = np.inf
    out = np.zeros(q.spec.payload_shape(direction))
    out.reshape(-1)[: bound.size] = bound.reshape(-1)
    return out
