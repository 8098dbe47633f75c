"""quantize and dequantize, through the registry."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from octavo import QuantizerSpec
from octavo.quantizer import Direction, Operand
from octavo_jax.arrays.checks import check_arrays, check_spec
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.arrays.sizes import GroupSizes, as_group_sizes, one_group
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.quantizer import dequantizer_for, quantizer_for
from octavo_jax.quantizers.derivatives import undifferentiated
from octavo_jax.remat.checkpoint_names import name_planes
from octavo_jax.scaling.seeds import seed_words
from octavo_jax.sharding.conflicts import check_whole

_MAX_GROUP = 1 << 32


def check_group_offset(group_offset: int | Array, groups: int) -> int | Array:
    """`group_offset`, which is part of a 32-bit counter word; ValueError for anything but one integer, and where a
    host value does not fit."""
    if isinstance(group_offset, jax.Array):
        if group_offset.ndim == 0 and jnp.issubdtype(group_offset.dtype, jnp.integer):
            return group_offset
        description = f"an array of shape {list(group_offset.shape)} and dtype {group_offset.dtype}"
        raise ValueError(f"group_offset is {description}; it is the number of the first group, one integer")
    try:
        number = operator.index(group_offset)
    except TypeError:
        raise ValueError(
            f"group_offset is {group_offset!r}; it is the number of the first group, one integer"
        ) from None
    if not 0 <= number <= _MAX_GROUP - groups:
        raise ValueError(f"group_offset is {number} with {groups} groups; group numbers are 0 to 2^32 - 1")
    return number


def check_operand(operand: object) -> None:
    """ValueError for what is no operand and not None."""
    if operand not in (None, "x", "w", "dy"):
        raise ValueError(f"operand is {operand!r}; it is 'x', 'w', 'dy' or None for the spec's role")


def check_scale(scale: Array | np.ndarray | None, spec: QuantizerSpec, groups: int) -> Array | None:
    """Delayed scaling's encode scales as an array, None for other scalings; ValueError where they do not fit.

    Values are checked where the host holds them.
    """
    if spec.scaling != "delayed":
        if scale is not None:
            raise ValueError(f"scale was given and scaling={spec.scaling!r} makes its own; leave it out")
        return None
    if scale is None:
        raise ValueError("scale is None and scaling is 'delayed'; give the encode scales [G] of its state")
    check_arrays(scale=scale)
    if scale.shape != (groups,) or scale.dtype != np.float32:
        raise ValueError(
            f"scale has shape {list(scale.shape)} and dtype {scale.dtype}; give one float32 encode scale per group, "
            f"[{groups}]"
        )
    if isinstance(scale, np.ndarray) and not bool(np.all(np.isfinite(scale) & (scale > 0))):
        raise ValueError(f"scale holds {scale.min()} to {scale.max()}; encode scales are finite and more than 0")
    return jnp.asarray(scale)


def quantize(
    x: Array | np.ndarray,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    seed: int | Array | None = None,
    operand: Operand | None = None,
    group_offset: int | Array = 0,
    scale: Array | np.ndarray | None = None,
    backend: BackendNames = None,
) -> GroupedTensor:
    """x in the planes that `spec.orientation` asks for, equal bit for bit to `octavo_numerics.quantize`.

    x             [M, K] with group_sizes, or as one group without; or [G, N, K] matrices, each its own group
    group_sizes   [G] integers on the host (checked) or as a jax.Array (clamped, never read back); sum <= M
    seed          of stochastic rounding: an int, an integer scalar array, or uint32 [2] words (low, high)
    operand       "x", "w" or "dy"; None: spec.role
    group_offset  number of the first group, in stochastic rounding's counter
    scale         [G] float32 encode scales of delayed scaling
    backend       a name or a closed list of names

    Every output of "x" or "w" carries `spec.checkpoint_name`, one of "dy" has no name. Rows past the sum are not read;
    codes and scales there mean nothing.

    Raises ValueError for shapes, dtypes, host sizes or a seed that do not fit; NoBackendError when nothing serves it.
    """
    check_spec(spec)
    x = jnp.asarray(x)
    if x.ndim not in (2, 3):
        raise ValueError(f"x has shape {list(x.shape)}; it is ragged rows [M, K] or stacked matrices [G, N, K]")
    check_whole("quantize", x=x)
    stacked = x.ndim == 3
    if stacked and group_sizes is not None:
        raise ValueError(f"x has shape {list(x.shape)} and group_sizes was given; stacked matrices take none")
    check_operand(operand)
    if spec.stochastic and seed is None:
        raise ValueError("seed is None and rounding is 'stochastic'; give an integer seed, another one each step")
    sizes = None
    if not stacked:
        sizes = one_group(x.shape[0]) if group_sizes is None else as_group_sizes(group_sizes, x.shape[0])
    groups = x.shape[0] if sizes is None else sizes.shape[0]
    if groups == 0:
        raise ValueError("there are 0 groups; give one or more")
    plan = quantizer_for(spec, x, groups, stacked, backend)
    q = plan.run(
        undifferentiated(x),
        sizes,
        seed=seed_words(seed) if spec.stochastic and seed is not None else None,
        operand=operand or spec.role,
        group_offset=check_group_offset(group_offset, groups),
        scale=check_scale(scale, spec, groups),
    )
    return name_planes(q, spec.checkpoint_name)


def dequantize(
    q: GroupedTensor,
    direction: Direction = "rowwise",
    *,
    preferred_element_type: DTypeLike = jnp.float32,
    backend: BackendNames = None,
) -> Array:
    """Values of one plane of q: [M, K] or [G, N, K], rows past the sum +0, every NaN 0x7FC00000.

    preferred_element_type   float32, whose values are exact; or bfloat16 or float16, to which these are rounded once

    Hadamard column data stay in the Hadamard domain and in their padded rows, [block_bound(M, G, 16) * 16, K].
    Raises ValueError for a plane that q does not have, NoBackendError when nothing reads its layouts, and TypeError
    where a derivative is taken in codes or scales.
    """
    if not isinstance(q, GroupedTensor):
        raise ValueError(f"q is a {type(q).__name__}; give what octavo_jax.quantize returned")
    if any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(q)):  # as files are read
        q = jax.tree.map(jnp.asarray, q)
    check_whole("dequantize", q=q)
    payload, _, _ = q.plane(direction)
    layouts = (q.spec.rowwise_layout, q.spec.columnwise_layout)
    plan = dequantizer_for(q.spec.quantizer, payload, layouts, backend, preferred_element_type)
    return plan.run(undifferentiated(q), direction)  # type: ignore[no-any-return]
