"""quantize: one operand to codes and scales, by the rules of docs/numerics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.quantizer import Direction, Operand
from octavo_numerics import checks
from octavo_numerics.arrays import QuantizedArray
from octavo_numerics.casts import F32, NAN_CODE, PAYLOAD_DTYPE, U8, cast
from octavo_numerics.groups import Groups, Units, units_of
from octavo_numerics.hadamard import hadamard
from octavo_numerics.mxfp4 import rounded_rows
from octavo_numerics.rounding import cast_stochastic, random_bits
from octavo_numerics.scales import e8m0_scales, fp32_scales, nvfp4_scales, reciprocal

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Randomness:
    """What the bits of stochastic rounding depend on besides position."""

    seed: int
    operand: Operand
    group_offset: int


@dataclass(frozen=True)
class Plane:
    """One direction's result on the valid rows alone.

    source [R, C]   what was quantized: the valid rows of x in fp32, or their Hadamard transform, padded rows included
    scaled [R, C]   source times its encode scale, before the cast
    codes  [R, C]
    scales          compact decode scales [row parts, column parts]
    factor [G]      NVFP4's second level, or None
    wanted [R, C]   MXFP4's values of the source, where the codes are to hold those; None for other quantizers
    """

    source: F32
    scaled: F32
    codes: U8
    scales: Array
    factor: F32 | None
    wanted: F32 | None = None


def _scales(
    x: F32, spec: QuantizerSpec, groups: Groups, units: Units, scale: F32 | None
) -> tuple[F32, Array, F32 | None]:
    """(encode scales, decode scales, second level): the first two [row parts, column parts]."""
    if scale is not None:
        encode = scale[:, None]
        return encode, reciprocal(encode), None
    amax = units.maximum(np.abs(x))
    if spec.scaling == "mxfp8":
        return *e8m0_scales(amax, spec.format), None
    if spec.scaling == "nvfp4":
        group_amax = Units(groups.whole, None, units.cols).maximum(np.abs(x))[:, 0]
        return nvfp4_scales(amax, group_amax, units.rows.group)
    epsilon, power_of_two = spec.amax_epsilon, spec.power_of_two
    return *fp32_scales(amax, spec.format, amax_epsilon=epsilon, power_of_two=power_of_two), None


@np.errstate(all="ignore")
def quantize_plane(
    x: F32, spec: QuantizerSpec, groups: Groups, direction: Direction, scale: F32 | None, random: Randomness | None
) -> Plane:
    """Quantize the valid rows `x` [U, K] in one direction; `random` is needed where rounding is stochastic."""
    if spec.hadamard and direction == "columnwise":
        x, groups = hadamard(groups.pad(x)), groups.padded()
    units = units_of(spec, direction, groups, x.shape[1])
    wanted = None if spec.mxfp4 is None else rounded_rows(x, groups, spec.mxfp4)
    values = x if wanted is None else wanted
    encode, decode, factor = _scales(values, spec, groups, units, scale)
    scaled = values * units.spread(encode)
    if random is None:
        codes = cast(scaled, spec.format)
    else:
        bits = random_bits(
            groups,
            x.shape[1],
            direction,
            seed=random.seed,
            operand=random.operand,
            group_offset=random.group_offset,
        )
        codes = cast_stochastic(scaled, bits)
    if scale is not None:
        # Scales from history cannot be poisoned by this step's Inf, which alone must not saturate.
        codes[np.isinf(x)] = NAN_CODE[spec.format]
    return Plane(x, scaled, codes, decode, factor, wanted)


def _filled(values: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """`values` in the first rows of zeros of `shape`, as `dtype` of the same width."""
    if values.size == math.prod(shape):
        return values.reshape(shape).view(dtype)
    out = np.zeros(shape, dtype=values.dtype)
    out.reshape(-1)[: values.size] = values.reshape(-1)
    return out.view(dtype)


@dataclass(frozen=True)
class Call:
    """The arguments of `quantize`, checked. `valid` [U, K]: the rows that belong to a group, in fp32."""

    tensor: GroupedTensorSpec
    groups: Groups
    valid: F32
    scale: F32 | None
    random: Randomness | None


def prepare(
    x: Any,
    spec: QuantizerSpec,
    group_sizes: Any = None,
    *,
    seed: Any = None,
    operand: Any = None,
    group_offset: Any = 0,
    scale: Any = None,
) -> Call:
    """Check the arguments of `quantize`; raises what it documents."""
    checks.check_subnormals()
    array = checks.check_input(x)
    sizes = checks.sizes_for(array, group_sizes)
    tensor = GroupedTensorSpec(
        shape=array.shape, groups=len(sizes), quantizer=spec, ragged_axis=None if array.ndim == 3 else 0
    )
    scale = checks.check_scale(scale, spec, len(sizes))
    seed = checks.check_seed(seed, spec)
    operand = checks.check_operand(operand, spec)
    group_offset = checks.check_group_offset(group_offset, len(sizes))
    random = None if seed is None else Randomness(seed, operand, group_offset)
    groups = Groups(sizes)
    rows = array.reshape(math.prod(array.shape[:-1]), array.shape[-1])[: groups.rows]
    return Call(tensor, groups, checks.to_fp32(rows), scale, random)


def quantize(
    x: Any,
    spec: QuantizerSpec,
    group_sizes: Any = None,
    *,
    seed: SupportsIndex | None = None,
    operand: Operand | None = None,
    group_offset: int = 0,
    scale: Any = None,
) -> QuantizedArray:
    """Quantize `x` in the directions that `spec.orientation` asks for.

    x             [M, K] ragged rows, or [G, N, K] stacked matrices, each its own group; bfloat16, float16 or float32
    group_sizes   [G] host integers, sum at most M; None: all M rows are one group. Not with stacked matrices
    seed          of stochastic rounding, taken modulo 2^64; needed where `spec.stochastic`
    operand       "x", "w" or "dy": part of stochastic rounding's counter; None: `spec.role`
    group_offset  number of the first group, likewise
    scale         [G] float32 ENCODE scales, needed by delayed scaling and taken by it alone

    Rows past the sum are not read; their codes and scales are zeros. Square specs round stochastically with row
    data's bits, because both directions share the row codes.

    Raises ValueError, one line that names the argument, its value and what to give instead.
    """
    call = prepare(x, spec, group_sizes, seed=seed, operand=operand, group_offset=group_offset, scale=scale)
    planes: dict[str, Array | None] = {}
    for direction in spec.directions:
        if direction == "columnwise" and spec.shares_codes and "rowwise" in planes:
            planes |= {name.replace("rowwise", "columnwise"): plane for name, plane in planes.items()}
            continue
        produced = "rowwise" if spec.shares_codes else direction
        plane = quantize_plane(call.valid, spec, call.groups, produced, call.scale, call.random)
        payload_dtype = PAYLOAD_DTYPE[spec.format]
        scale_dtype = PAYLOAD_DTYPE["e4m3"] if spec.scale_format == "e4m3" else plane.scales.dtype
        planes[direction] = _filled(plane.codes, call.tensor.payload_shape(direction), payload_dtype)
        planes[f"{direction}_scale"] = _filled(plane.scales, call.tensor.scale_shape(direction), scale_dtype)
        planes[f"{direction}_global"] = plane.factor
    stacked = call.tensor.ragged_axis is None
    return QuantizedArray(spec=call.tensor, group_sizes=None if stacked else call.groups.sizes, **planes)
