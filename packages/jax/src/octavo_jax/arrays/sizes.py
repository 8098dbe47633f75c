"""Group sizes: checked where they are on the host, clamped and reported where they are traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo import check_group_sizes
from octavo_jax.arrays.checks import check_fixed
from octavo_jax.arrays.host import is_on_host

NEGATIVE_SIZE = 1
"""Bit of the status word: a size is negative and was taken as 0."""

SUM_PAST_ROWS = 2
"""Bit of the status word: the sizes sum past the rows and were cut off there."""

GroupSizes = Array | np.ndarray | Sequence[int]


def in_one_array(group_sizes: GroupSizes) -> GroupSizes:
    """A sequence of JAX's integers, of which numpy could make no array where they are traced, as a jax.Array."""
    if isinstance(group_sizes, list | tuple) and any(isinstance(s, jax.Array) for s in jax.tree.leaves(group_sizes)):
        return jnp.asarray(group_sizes)
    return group_sizes


def as_group_sizes(group_sizes: GroupSizes, rows: int, blocks: tuple[int, ...] = (), *, reports: bool = False) -> Array:
    """Integers of 32 bits or more [*blocks, G]: `group_sizes`, of `rows` rows each.

    A list, a tuple, a numpy array, and a jax.Array whose values lie on CPUs of this process are checked: ValueError for
    a negative size or a sum past `rows`. One that is traced or on an accelerator is never read back; the backend clamps
    it and `status` says so.

    reports   the caller is told by `status` and asks for no error: then no jax.Array is checked
    """
    check_fixed(rows, "x")
    group_sizes = in_one_array(group_sizes)
    if isinstance(group_sizes, jax.Array):
        if (
            group_sizes.shape[:-1] != blocks
            or group_sizes.ndim == 0
            or not jnp.issubdtype(group_sizes.dtype, jnp.integer)
        ):
            raise ValueError(
                f"group_sizes has shape {list(group_sizes.shape)} and dtype {group_sizes.dtype}; "
                "it is one integer per group, shape [G]"
            )
        if not reports and is_on_host(group_sizes):
            _check(np.asarray(group_sizes), rows)
        return widened(group_sizes)
    host = np.asarray(group_sizes)
    if host.shape[:-1] != blocks or host.ndim == 0 or not np.issubdtype(host.dtype, np.integer):
        raise ValueError(
            f"group_sizes has shape {list(host.shape)} and dtype {host.dtype}; it is one integer per group, shape [G]"
        )
    _check(host, rows)
    return jnp.asarray(host.astype(np.int32))


def _check(sizes: np.ndarray, rows: int) -> None:
    for block in sizes.reshape(-1, sizes.shape[-1]) if sizes.size else ():
        check_group_sizes(block.tolist(), rows)


def widened(integers: Array) -> Array:
    """`integers`, as int32 where they have fewer than 32 bits.

    A Python number in an expression takes the array's dtype, so a bound of 256 is 0 beside uint8.
    """
    return integers.astype(jnp.int32) if integers.dtype.itemsize < 4 else integers


def end_of(group_sizes: Array) -> Array:
    """int32, the row after the last one that is a group's; `jnp.sum` alone is int64 with 64-bit types turned on."""
    return jnp.sum(group_sizes, dtype=jnp.int32)


def as_int32(integers: Array | np.ndarray) -> Array:
    """`integers` as int32, those that do not fit as the nearest one that does."""
    # numpy's are clamped by numpy: JAX would drop the upper halves of 64 bits first
    library: Any = np if isinstance(integers, np.ndarray) else jnp
    wide, ends = widened(library.asarray(integers)), np.iinfo(np.int32)
    if jnp.issubdtype(wide.dtype, jnp.signedinteger):
        wide = library.maximum(wide, int(ends.min))
    return jnp.asarray(library.minimum(wide, int(ends.max)).astype(np.int32))


def group_ends(group_sizes: Array, rows: int) -> Array:
    """int32 [G]: the row after each group's last; negative sizes count as 0, nothing reaches past `rows`."""
    sizes = jnp.clip(group_sizes, 0, rows).astype(jnp.uint32)
    # Saturating sums: a plain cumsum of many clamped sizes could wrap around.
    ends: Array = lax.associative_scan(lambda a, b: jnp.minimum(a + b, np.uint32(rows)), sizes)
    return ends.astype(jnp.int32)


def status(group_sizes: Array, rows: int) -> Array:
    """int32 status word of sizes [G] or [*B, G]: 0, or the sum of `NEGATIVE_SIZE` and `SUM_PAST_ROWS`."""
    if group_sizes.ndim > 1:
        words = jax.vmap(lambda sizes: status(sizes, rows))(group_sizes)
        bits = (jnp.any(words & bit != 0) * bit for bit in (NEGATIVE_SIZE, SUM_PAST_ROWS))
        return sum(bits, jnp.int32(0))
    negative = jnp.any(group_sizes < 0)
    sizes = jnp.clip(group_sizes, 0, rows).astype(jnp.int32)
    ends = group_ends(group_sizes, rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    past = jnp.any(group_sizes > rows) | jnp.any(ends - starts < sizes)
    return negative.astype(jnp.int32) * NEGATIVE_SIZE + past.astype(jnp.int32) * SUM_PAST_ROWS


def one_group(rows: int) -> Array:
    """The sizes of a matrix that is one group."""
    check_fixed(rows, "x")
    return jnp.full((1,), rows, jnp.int32)
