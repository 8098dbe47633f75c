"""Arguments of quantizers and of what reads their tensors: checked, and as the functions of a plan take them."""

from __future__ import annotations

import operator
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo import QuantizerSpec
from octavo.errors import one_of
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction, Operand
from octavo_jax.arithmetic.casts import PAYLOAD_DTYPE, SCALE_DTYPE
from octavo_jax.arrays.checks import check_arrays, check_fixed_axes
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.arrays.operands import check_array, check_groups
from octavo_jax.arrays.sizes import GroupSizes, as_group_sizes, one_group
from octavo_jax.scaling.seeds import seed_words

_MAX_GROUP = 1 << 32


def sizes_of(x: Array, group_sizes: GroupSizes | None) -> Array | None:
    """The sizes [G] of the rows x [M, C], one group without `group_sizes`; None for matrices [G, N, K].

    Raises ValueError for another rank, for sizes that do not fit or are symbols, and for matrices with sizes.
    """
    if x.ndim not in (2, 3):
        raise ValueError(f"x has shape {list(x.shape)}; it is ragged rows [M, K] or stacked matrices [G, N, K]")
    if x.ndim == 2:
        check_fixed_axes("x", x.shape[1:])
        return one_group(x.shape[0]) if group_sizes is None else as_group_sizes(group_sizes, x.shape[0])
    check_fixed_axes("x", x.shape)
    if group_sizes is not None:
        raise ValueError(f"x has shape {list(x.shape)} and group_sizes was given; stacked matrices take none")
    return None


def check_plane(q: GroupedTensor, direction: Direction) -> None:
    """ValueError unless q's group sizes, and in the plain layout the arrays of this plane, are what its spec says.

    Only backends know the shapes of other layouts.
    """
    spec, (codes, scale, second) = q.spec, q.plane(direction)
    check_groups(q)
    if (spec.rowwise_layout if direction == "rowwise" else spec.columnwise_layout) != PLAIN:
        return
    quantizer = spec.quantizer
    check_array(codes, direction, spec.payload_shape(direction), PAYLOAD_DTYPE[quantizer.format])
    check_array(scale, f"{direction}_scale", spec.scale_shape(direction), SCALE_DTYPE[quantizer.scale_format])
    if quantizer.scaling == "nvfp4":
        check_array(second, f"{direction}_global", (spec.groups,), jnp.float32)


def drawn_seed(spec: QuantizerSpec, seed: int | Array | None) -> Array | None:
    """The words of the seed if `spec` rounds stochastically, else None; ValueError for a seed that is missing."""
    if not spec.stochastic:
        return None
    if seed is None:
        raise ValueError("seed is None and rounding is 'stochastic'; give an integer seed, another one each step")
    return seed_words(seed)


def quantizer_keywords(
    spec: QuantizerSpec,
    groups: int,
    seed: int | Array | None,
    operand: Operand | None,
    group_offset: int | Array,
    scale: Array | np.ndarray | None,
) -> dict[str, Any]:
    """The keywords of octavo_registry.contract.quantize.Quantize; ValueError for arguments that do not fit."""
    named = spec.role if operand is None else one_of("operand", operand, get_args(Operand))
    if groups == 0:
        raise ValueError("there are 0 groups; give one or more")
    return {
        "seed": drawn_seed(spec, seed),
        "operand": named,
        "group_offset": check_group_offset(group_offset, groups),
        "scale": check_scale(scale, spec, groups),
    }


def check_group_offset(group_offset: int | Array, groups: int) -> int | Array:
    """`group_offset`; ValueError unless it is one integer that, if the host knows it, fits a 32-bit counter word."""
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
