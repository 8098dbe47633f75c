"""The shape of a product's result."""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, ...]


def product_shape(gemm: str, names: Sequence[str], left: Shape, right: Shape, groups: int) -> Shape:
    """Of the result; ValueError where operands of these names and shapes do not go together in `groups` groups.

    gemm   the kernels': "fprop" of a right operand [G, N, K], "dgrad" of one [G, K, N], "wgrad" of two ragged ones
    """
    if gemm == "wgrad":
        fits = len(left) == len(right) == 2 and left[0] == right[0]
        shape: Shape = (groups, left[-1], right[-1])
    else:
        depth, columns = (1, 2) if gemm == "dgrad" else (2, 1)
        fits = len(left) == 2 and len(right) == 3 and right[0] == groups and left[1] == right[depth]
        shape = (left[0], right[columns]) if fits else ()
    if not fits or 0 in shape[1:]:
        axes = {"wgrad": "[M, A] and [M, B]", "fprop": "[M, K] and [G, N, K]", "dgrad": "[M, K] and [G, K, N]"}
        raise ValueError(
            f"{names[0]} {list(left)} and {names[1]} {list(right)} in {groups} groups do not fit; they are "
            f"{axes[gemm]}, with group_sizes of G groups, N and K of 1 or more"
        )
    return shape
