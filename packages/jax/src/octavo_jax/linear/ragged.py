"""ragged_dot: `jax.lax.ragged_dot` with a recipe."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from octavo import Recipe
from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.arrays.dtypes import dtype_name
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.arrays.sizes import GroupSizes
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.layer import HIGH_PRECISION
from octavo_jax.dispatch.room import Room
from octavo_jax.linear.arguments import as_array
from octavo_jax.linear.grouped import grouped_dense


def check_precision(precision: Any, recipe: Recipe) -> None:
    """ValueError for a `precision` that the products of `recipe` do not have.

    High precision multiplies in fp32 or finer, whatever `jax.lax.Precision` asks for; codes are multiplied as they are.
    """
    for one in precision if isinstance(precision, tuple | list) else (precision,):
        try:
            level = jax.lax.Precision(one)
        except ValueError:
            raise ValueError(
                f"precision is {precision!r}; the recipe decides how products are formed, so leave it out"
            ) from None
        if level != jax.lax.Precision.DEFAULT and recipe.quantizes("fprop"):
            raise ValueError(
                f"precision is {precision!r} and the recipe {recipe.kind!r} multiplies quantized operands; leave it "
                "out, or give recipe=None"
            )


def _check_operands(lhs: Array, rhs: Array) -> None:
    """ValueError in the names of `ragged_dot`, where grouped_dense's are others."""
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        dtype_name(operand.dtype, name)
    if lhs.ndim < 2 or rhs.ndim != 3 or lhs.shape[-1] != rhs.shape[1]:
        turned = lhs.ndim > 1 and rhs.ndim == 3 and lhs.shape[-1] == rhs.shape[2]
        hint = "; swap rhs's last two axes, or give it to octavo_jax.grouped_dense with contracting_dims=((-1,), (2,))"
        raise ValueError(
            f"lhs has shape {list(lhs.shape)} and rhs {list(rhs.shape)}; they are [M, K] and [G, K, N]{hint * turned}"
        )


def ragged_dot(
    lhs: Array | np.ndarray,
    rhs: Array | np.ndarray,
    group_sizes: GroupSizes,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Array | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    *,
    recipe: RecipeLike,
    seed: int | Array | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    output_checkpoint_name: str | None = None,
    backend: BackendNames = None,
    room: Room | None = None,
) -> Array:
    """`jax.lax.ragged_dot(lhs, rhs, group_sizes, ...)` computed by a recipe: lhs [M, K], rhs [G, K, N] to [M, N].

    precision                of high precision: any `jax.lax.Precision`, all of which fp32 products satisfy. Of other
                             recipes: None or DEFAULT
    preferred_element_type   dtype of the result; None: recipe.output_dtype, else what lhs and rhs promote to
    group_offset             None. JAX takes the argument and computes nothing with it on any device (it raises, too)
    out_sharding             None
    Other arguments as in `grouped_dense`, which has bias, stateful recipes and a number of the first group.

    Rows past the sum of the sizes are zero, as JAX's; differentiable in reverse in lhs and rhs.
    """
    recipe = as_recipe(recipe) or HIGH_PRECISION
    check_precision(precision, recipe)
    if recipe.stateful:
        raise ValueError(
            f"recipe is {type(recipe).__name__}, which takes its scales from history, and ragged_dot has no place for "
            "a state; give CurrentScaling, or call grouped_dense, which takes state="
        )
    if group_offset is not None:
        raise ValueError(
            "group_offset was given, which jax.lax.ragged_dot does not compute either; slice rhs and group_sizes to "
            "the groups that lhs holds"
        )
    if out_sharding is not None:
        raise ValueError(
            f"out_sharding is {out_sharding!r}; shard outside with jax.shard_map and call this on the local arrays"
        )
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    _check_operands(lhs, rhs)
    y: Array = grouped_dense(
        lhs,
        rhs,
        group_sizes,
        recipe=recipe,
        seed=seed,
        preferred_element_type=preferred_element_type or recipe.output_dtype or jnp.result_type(lhs, rhs),
        checkpoint_name=checkpoint_name,
        output_checkpoint_name=output_checkpoint_name,
        backend=backend,
        room=room,
    )
    return y
