"""Sums inside a region whose axes the caller made manual (`jax.shard_map`): over those axes they are JAX's own.

A gradient of what shards share is summed by the transpose of the operation that shared it: where types are checked
(check_vma=True), of the cast in `octavo_jax.quantizers.derivatives.call_reverse_mode_only`, else of the shard_map. A y
that is a partial sum is added up after the layer's custom_vjp: without that check `jax.shard_map` gives each shard its
share of dy, and counts on the transpose of the `psum` that made y.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from octavo import Recipe
from octavo_jax.sharding.placement import Placement


def summed(placement: Placement, x: Array, axes: tuple[str, ...]) -> Array:
    """x summed over those of `axes` that this package made manual itself; over the caller's, JAX's transpose sums."""
    own = placement.non_manual(axes)
    total: Array = lax.psum(x, own) if own else x  # type: ignore[no-untyped-call]
    return total


def partial_sum_axes(placement: Placement | None) -> tuple[str, ...]:
    """The caller's manual axes over which a layer's y is only a partial sum; () where it is the whole."""
    if placement is None:
        return ()
    manual = placement.manual_axes
    return tuple(name for name in placement.cutting_axes("i") if name in manual)


def on_first_shard(bias: Array | None, axes: tuple[str, ...]) -> Array | None:
    """The bias on the first shard and zeros on the others, so that a sum over `axes` adds it once."""
    return bias if bias is None or not axes else jnp.where(lax.axis_index(axes) == 0, bias, 0)


def summed_result(y: Array, axes: tuple[str, ...], recipe: Recipe | None, x: Array, preferred: Any) -> Array:
    """The sum of float32 y over `axes`, rounded once to the dtype that the caller wants of y; y itself without axes."""
    if not axes:
        return y
    total: Array = lax.psum(y, axes)  # type: ignore[no-untyped-call]
    return total.astype(preferred or (recipe.output_dtype if recipe is not None else None) or x.dtype)


def differentiated_once(results: Any, axes: tuple[str, ...]) -> Any:
    """`results` of a shard_map with check_vma=False whose `axes` cut nothing: every shard along them has the same.

    JAX gives each of them its share of the results' gradient and adds up what comes of it, history and scale of a
    delayed state included. Here the first has the whole gradient, and the others zeros.
    """
    return _differentiated_once(results, axes) if axes else results


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _differentiated_once(results: Any, axes: tuple[str, ...]) -> Any:
    return results


def _on_first_alone(axes: tuple[str, ...], _: None, shares: Any) -> tuple[Any]:
    is_first, shards = lax.axis_index(axes) == 0, lax.axis_size(axes)

    def whole(share: Any) -> Any:
        return jnp.where(is_first, share * shards, 0) if jnp.issubdtype(share.dtype, jnp.inexact) else share

    return (jax.tree.map(whole, shares),)


_differentiated_once.defvjp(lambda results, axes: (results, None), _on_first_alone)
