"""ragged_dot: `jax.lax.ragged_dot` with a recipe."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from octavo import Recipe
from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.dense import grouped_dense
from octavo_jax.dispatch import Names
from octavo_jax.sizes import GroupSizes


def ragged_dot(
    lhs: Array | np.ndarray,
    rhs: Array | np.ndarray,
    group_sizes: GroupSizes,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Array | None = None,
    *,
    recipe: Recipe | None,
    seed: int | Array | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    backend: Names = None,
) -> Array:
    """`jax.lax.ragged_dot(lhs, rhs, group_sizes, ...)` computed by a recipe: lhs [M, K], rhs [G, K, N] to [M, N].

    precision      None, or DEFAULT: the recipe decides how products are formed
    group_offset   None: jax.lax.ragged_dot would start at this group, which here is a slice of rhs and of group_sizes
                   (the number that stochastic rounding counts from is `grouped_dense`'s group_offset)
    Other arguments as in `grouped_dense`, which has the stateful recipes too.
    """
    if precision not in (None, jax.lax.Precision.DEFAULT):
        raise ValueError(f"precision is {precision!r}; the recipe decides how products are formed, so leave it out")
    if group_offset is not None:
        raise ValueError("group_offset was given; slice rhs and group_sizes to the groups that lhs holds instead")
    y: Array = grouped_dense(
        lhs,
        rhs,
        group_sizes,
        recipe=recipe,
        seed=seed,
        preferred_element_type=preferred_element_type,
        checkpoint_name=checkpoint_name,
        backend=backend,
    )
    return y
