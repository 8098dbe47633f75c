"""Quantized operands of shards: pytrees of planes that are not computed yet, and shards gathered to a whole plane."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.remat.checkpoint_names import DIRECTIONS, FIELDS
from octavo_jax.sharding import specs
from octavo_jax.sharding.placement import Letter, Placement
from octavo_registry import QuantizePlan, Weight

Some = TypeVar("Some")


def quantized_spec(plan: QuantizePlan, shape: tuple[int, ...], groups: int) -> GroupedTensorSpec:
    """The spec of what `plan` returns for rows [M, C] or matrices [G, R, C]; planes that are not computed are plain."""
    quantizer = plan.request.quantizer
    assert quantizer is not None
    layouts = dict(zip(DIRECTIONS, plan.request.layouts, strict=True))
    produced = {
        direction: layouts[direction] if direction in quantizer.directions else PLAIN for direction in DIRECTIONS
    }
    return GroupedTensorSpec(
        shape=shape,
        groups=groups,
        quantizer=quantizer,
        ragged_axis=0 if len(shape) == 2 else None,
        rowwise_layout=produced["rowwise"],
        columnwise_layout=produced["columnwise"],
    )


def structure_of(spec: GroupedTensorSpec) -> GroupedTensor:
    """A GroupedTensor with None where `spec` has no array, and no sizes: the pytree structure of a result."""
    names = [f for d in spec.quantizer.directions for f in FIELDS[d] if _has(spec.quantizer, f)]
    return GroupedTensor(spec, None, **dict.fromkeys(names, True))  # type: ignore[arg-type]


def _has(quantizer: QuantizerSpec, field: str) -> bool:
    return quantizer.scaling == "nvfp4" or not field.endswith("_global")


def with_shared_codes(q: GroupedTensor) -> GroupedTensor:
    """q with one array where both planes are the same one, so that it is named and saved once."""
    spec = q.spec
    same = spec.quantizer.shares_codes and spec.rowwise_layout == spec.columnwise_layout == PLAIN
    if not same or q.rowwise is None or q.columnwise is None:
        return q
    return replace(q, columnwise=q.rowwise, columnwise_scale=q.rowwise_scale, columnwise_global=q.rowwise_global)


def with_shard_shape(placement: Placement, operand: Some, letters: tuple[Letter, ...]) -> Some:
    """An operand inside a local function, whose spec has the shape of the shard.

    It has that already unless no mesh was known when the operand was quantized.
    """
    if not placement.mesh_unknown or not isinstance(operand, GroupedTensor):
        return operand
    cut = [placement.shard_count(placement.axes_of(letter)) for letter in letters]
    shape = [size // by for size, by in zip(operand.spec.shape, cut, strict=True)]
    return replace(operand, spec=_resized(operand.spec, shape))


def gathered_plane(placement: Placement, q: GroupedTensor, direction: Direction, weight: Weight) -> GroupedTensor:
    """The whole of one plane of a kernel, from the shards [E, ...] that fsdp cut: payload and scales, as bytes.

    E2M1 codes travel two per byte.
    """
    axes, letter = placement.gathered_axes, placement.gathered_letter
    if not axes:
        return q
    sides = specs.matrix_letters(weight)
    whole: dict[str, Array] = {}
    for field in FIELDS[direction]:
        part = getattr(q, field)
        if part is None:
            continue
        letters = specs.plane_letters(q.spec.quantizer, direction, field, *sides, stacked=True)
        if letter not in letters:
            whole[field] = part
            continue
        packed = field == direction and q.spec.quantizer.format == "e2m1" and part.shape[-1] % 2 == 0
        joined = gathered_array(_packed(part) if packed else part, axes, 1 + letters.index(letter))
        whole[field] = _unpacked(joined) if packed else joined
    by = placement.shard_count(axes)
    shape = [size * by if one == letter else size for one, size in zip(("g", *sides), q.spec.shape, strict=True)]
    return GroupedTensor(_resized(q.spec, shape), None, **whole)


def _resized(spec: GroupedTensorSpec, shape: list[int]) -> GroupedTensorSpec:
    groups = spec.groups if spec.ragged_axis == 0 else shape[0]
    return GroupedTensorSpec(**{**dict(spec), "shape": tuple(shape), "groups": groups})


def _packed(codes: Array) -> Array:
    """E2M1 codes, two per byte along the last axis, the even column low."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _unpacked(pairs: Array) -> Array:
    """What was packed."""
    return jnp.stack([pairs & 0xF, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])


def gathered_array(part: Array, axes: tuple[str, ...], axis: int) -> Array:
    """Shards joined along `axis`. Codes travel as bytes, which every backend of XLA's collectives takes."""
    bits: Any = lax.bitcast_convert_type(part, jnp.uint8) if part.dtype.itemsize == 1 else part
    joined = lax.all_gather(bits, axes, axis=axis, tiled=True)
    return lax.bitcast_convert_type(joined, part.dtype) if part.dtype.itemsize == 1 else joined
