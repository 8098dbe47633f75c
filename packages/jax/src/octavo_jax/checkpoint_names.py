"""Naming quantized arrays for `jax.checkpoint`, by their bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from octavo_jax.grouped_tensor import GroupedTensor

_UNSIGNED: dict[int, DTypeLike] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def name_array(x: Array, name: str) -> Array:
    """x, known to checkpoint policies as `name`; for high-precision arrays, which survive being saved as floats."""
    named: Array = checkpoint_name(x, name)  # type: ignore[no-untyped-call]
    return named


def name_bits(x: Array, name: str) -> Array:
    """x, known to checkpoint policies as `name`.

    `jax.checkpoint` puts saved floats through an IEEE `reduce_precision`, which turns e4m3fn values above 240 into
    NaN on XLA:CPU; so the name goes to the bits, and the bit casts around it cost nothing.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return name_array(x, name)
    bits = lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
    return lax.bitcast_convert_type(name_array(bits, name), x.dtype)


def name_planes(q: GroupedTensor, name: str | None) -> GroupedTensor:
    """q with every payload and scale named, each array once; None names nothing.

    The result must be what every later operation reads: a use of the unnamed arrays makes remat quantize again.
    """
    if name is None:
        return q
    named: dict[int, Array] = {}

    def once(leaf: Array) -> Array:
        if id(leaf) not in named:
            named[id(leaf)] = name_bits(leaf, name)
        return named[id(leaf)]

    planes = GroupedTensor(
        q.spec,
        None,
        q.rowwise,
        q.rowwise_scale,
        q.rowwise_global,
        q.columnwise,
        q.columnwise_scale,
        q.columnwise_global,
    )
    made = jax.tree.map(once, planes)
    return GroupedTensor(
        q.spec,
        q.group_sizes,
        made.rowwise,
        made.rowwise_scale,
        made.rowwise_global,
        made.columnwise,
        made.columnwise_scale,
        made.columnwise_global,
    )
