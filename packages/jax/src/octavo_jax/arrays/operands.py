"""Arguments of a backend's functions, checked before anything is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo import QuantizerSpec
from octavo_jax.arrays.dtypes import DTYPES, dtype_name
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.arrays.sizes import one_group


def check_out(out: Any) -> None:
    """ValueError for an array to write into."""
    if out is not None:
        raise ValueError("out was given; JAX arrays are immutable, so take the returned array instead")


def check_input(x: Any, name: str, ranks: tuple[int, ...]) -> None:
    """ValueError unless x is a JAX array of bfloat16, float16 or float32 with one of these ranks."""
    if not isinstance(x, jax.Array):
        raise ValueError(f"{name} is a {type(x).__name__}; give a jax.Array (jnp.asarray makes one)")
    if x.ndim not in ranks:
        shapes = " or ".join({2: "[M, C]", 3: "[G, N, C]"}[rank] for rank in ranks)
        raise ValueError(f"{name} has shape {list(x.shape)}; it is {shapes}")
    dtype_name(x.dtype, name)


def checked_groups(x: Array, group_sizes: Array | None) -> tuple[Array | None, int]:
    """The sizes of a quantizer's operand x, and G; ValueError for arguments that do not fit.

    x   rows [M, C] with sizes [G]; without sizes one matrix, which is a group, or stacked ones [G, N, C]
    """
    check_input(x, "x", (2,) if group_sizes is not None else (2, 3))
    if group_sizes is None and x.ndim == 2:
        group_sizes = one_group(x.shape[0])
    if group_sizes is None:
        return None, x.shape[0]
    check_sizes(group_sizes)
    return group_sizes, group_sizes.shape[0]


def check_sizes(group_sizes: Any, groups: int | None = None) -> None:
    """ValueError unless group_sizes is an integer array [G] of one group or more, or of `groups`."""
    if not isinstance(group_sizes, jax.Array):
        raise ValueError(
            f"group_sizes is a {type(group_sizes).__name__}; give a jax.Array of one integer per group, [G]"
        )
    if group_sizes.ndim != 1 or not jnp.issubdtype(group_sizes.dtype, jnp.integer) or group_sizes.shape[0] == 0:
        raise ValueError(
            f"group_sizes has shape {list(group_sizes.shape)} and dtype {group_sizes.dtype}; it is one integer per "
            "group, shape [G] with G of 1 or more"
        )
    if groups is not None and group_sizes.shape[0] != groups:
        raise ValueError(
            f"group_sizes has shape {list(group_sizes.shape)} and the tensor's spec {groups} groups; give one integer "
            f"per group, [{groups}]"
        )


def check_groups(q: GroupedTensor) -> None:
    """ValueError unless q has one size for each group of its spec, and none where they are stacked matrices."""
    if q.spec.ragged_axis == 0:
        check_sizes(q.group_sizes, q.spec.groups)
    elif q.group_sizes is not None:
        raise ValueError(f"group_sizes was given with {list(q.spec.shape)}; stacked matrices take None")


def check_array(array: Any, name: str, shape: tuple[int, ...], dtype: Any) -> None:
    """ValueError unless `array` has exactly this shape and dtype."""
    actual = getattr(array, "shape", None), getattr(array, "dtype", None)
    if actual != (shape, jnp.dtype(dtype)):
        given = f"shape {list(actual[0])} and dtype {actual[1]}" if actual[0] is not None else repr(array)
        raise ValueError(f"{name} has {given}; it must have shape {list(shape)} and dtype {jnp.dtype(dtype)}")


def check_float(array: Any, name: str, shape: tuple[int, ...]) -> None:
    """ValueError unless `array` is a JAX array of this shape, of bfloat16, float16 or float32."""
    if not isinstance(array, jax.Array):
        raise ValueError(f"{name} is a {type(array).__name__}; give a jax.Array (jnp.asarray makes one)")
    if array.shape != shape or array.dtype not in DTYPES:
        raise ValueError(
            f"{name} has shape {list(array.shape)} and dtype {array.dtype}; it must have shape {list(shape)} and "
            "dtype bfloat16, float16 or float32"
        )


def first_group(group_offset: int | Array) -> Array | np.ndarray:
    """The number of an operand's first group as a uint32 scalar; ValueError for an array that is no integer."""
    if not isinstance(group_offset, jax.Array):
        return np.asarray(int(group_offset) % (1 << 32), np.uint32)
    if group_offset.ndim != 0 or not jnp.issubdtype(group_offset.dtype, jnp.integer):
        raise ValueError(
            f"group_offset has shape {list(group_offset.shape)} and dtype {group_offset.dtype}; it is one integer"
        )
    return group_offset.astype(jnp.uint32)


def check_seed(spec: QuantizerSpec, seed: object) -> None:
    """ValueError where the quantizer rounds stochastically and there is no seed."""
    if spec.stochastic and seed is None:
        raise ValueError("seed is None and the quantizer rounds stochastically; give an integer seed")


def encode_scale(spec: QuantizerSpec, scale: Any, groups: int) -> Array | None:
    """Delayed scaling's encode scales, fp32 [G]; None for other scalings, which make their own."""
    if spec.scaling != "delayed":
        return None
    if scale is None:
        raise ValueError("scale is None and the scaling is 'delayed'; give the encode scale of each group, [G]")
    check_array(scale, "scale", (groups,), jnp.float32)
    return jnp.asarray(scale)
