"""Which axes a layer contracts: the order of its kernel's axes, and the axes of the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from octavo_registry import Weight

ContractingDims = tuple[Sequence[int], Sequence[int]]

_GROUPED: dict[int, Weight] = {1: "kn", 2: "nk"}


def grouped_weight(contracting_dims: ContractingDims, x_rank: int) -> Weight:
    """The order of axes of a grouped layer's kernel: "kn" as [G, K, N], "nk" as [G, N, K].

    contracting_dims   the last axis of x, and axis 1 or 2 of the kernel, as `jax.lax.dot_general` takes them; negative
                       ones count from the end
    """
    x_dims, kernel_dims = _pair(contracting_dims)
    x_last = x_dims in ((-1,), (x_rank - 1,))
    weight = _GROUPED.get(kernel_dims[0] % 3) if len(kernel_dims) == 1 and -3 <= kernel_dims[0] < 3 else None
    if not x_last or weight is None:
        raise ValueError(
            f"contracting_dims is {contracting_dims!r}; a grouped layer contracts the last axis of x with axis 1 or 2 "
            "of the kernel, so give ((-1,), (1,)) for [G, K, N] or ((-1,), (2,)) for [G, N, K]"
        )
    return weight


class DenseAxes(NamedTuple):
    """Axes of a layer of one matrix.

    weight      the kernel's order of axes, seen as [1, K, N] ("kn") or [1, N, K] ("nk")
    rows        axes of x that stay, the result's first ones
    columns     axes of the kernel that stay, the result's last ones
    k           product of the contracted sizes
    contracted  how many axes are contracted
    """

    weight: Weight
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    k: int
    contracted: int

    def matrix(self, kernel_shape: tuple[int, ...]) -> tuple[int, int, int]:
        """The kernel's shape as the stack of one matrix."""
        cut = self.contracted if self.weight == "kn" else len(kernel_shape) - self.contracted
        return 1, math.prod(kernel_shape[:cut]), math.prod(kernel_shape[cut:])


def dense_axes(
    contracting_dims: ContractingDims,
    x_shape: tuple[int, ...],
    kernel_shape: tuple[int, ...],
    shards: tuple[int, int] = (1, 1),
) -> DenseAxes:
    """The axes of `dense`: x's last ones with the kernel's first or last ones, in their order.

    shards   how many the kernel is of, along the first axis that is contracted and the first that stays
    """
    x_dims, kernel_dims = _pair(contracting_dims)
    count = len(x_dims)
    if count == 0 or count != len(kernel_dims) or count > min(len(x_shape), len(kernel_shape)):
        raise ValueError(
            f"contracting_dims is {contracting_dims!r} with x {list(x_shape)} and kernel {list(kernel_shape)}; name as "
            "many axes of one as of the other, at least one, such as ((-1,), (0,))"
        )
    x_axes, kernel_axes = _counted(x_dims, len(x_shape)), _counted(kernel_dims, len(kernel_shape))
    first, last = tuple(range(count)), tuple(range(len(kernel_shape) - count, len(kernel_shape)))
    if x_axes != tuple(range(len(x_shape) - count, len(x_shape))) or kernel_axes not in (first, last):
        raise ValueError(
            f"contracting_dims is {contracting_dims!r} with x {list(x_shape)} and kernel {list(kernel_shape)}; the "
            "last axes of x meet the first or the last ones of the kernel, in one order: move them with jnp.moveaxis"
        )
    contracted = x_shape[-count:]
    whole = list(kernel_shape)
    for axis, several in zip((kernel_axes[0], count if kernel_axes == first else 0), shards, strict=True):
        if several > 1 and axis < len(whole):
            whole[axis] *= several
    kernel_shape = tuple(whole)
    kernel_contracted = kernel_shape[:count] if kernel_axes == first else kernel_shape[-count:]
    if contracted != kernel_contracted:
        raise ValueError(
            f"x {list(x_shape)} has {list(contracted)} in the contracted axes and kernel {list(kernel_shape)} has "
            f"{list(kernel_contracted)}; with contracting_dims {contracting_dims!r} they are equal"
        )
    columns = kernel_shape[count:] if kernel_axes == first else kernel_shape[:-count]
    weight: Weight = "kn" if kernel_axes == first else "nk"
    return DenseAxes(weight, x_shape[:-count], columns, math.prod(contracted), count)


def _pair(contracting_dims: ContractingDims) -> tuple[tuple[int, ...], tuple[int, ...]]:
    try:
        x_dims, kernel_dims = contracting_dims
        return tuple(int(axis) for axis in x_dims), tuple(int(axis) for axis in kernel_dims)
    except (TypeError, ValueError):
        raise ValueError(
            f"contracting_dims is {contracting_dims!r}; give two sequences of axes, x's and the kernel's, such as "
            "((-1,), (1,))"
        ) from None


def _counted(axes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(axis + rank if axis < 0 else axis for axis in axes)
