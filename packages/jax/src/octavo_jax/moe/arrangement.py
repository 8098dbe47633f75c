"""The row of each choice of a router: static shapes, nothing is dropped unless it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.arithmetic.widening import in_fp32
from octavo_jax.arrays.checks import as_count, check_arrays, check_fixed, check_text
from octavo_jax.arrays.exportable import exportable
from octavo_jax.arrays.sizes import as_int32
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.moe.row_functions import DeviceAndBackends, route_for
from octavo_jax.remat.checkpoint_names import name_array
from octavo_jax.sharding.conflicts import check_whole

_MAX_ROWS = 1 << 31


@exportable
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """T tokens with k choices each among E experts, as R rows that are sorted by expert. R is T * k, or fewer if asked.

    group_sizes     [E] int32, rows of each expert. Their sum is T * k, less the choices that are left out
    order           [R] int32, the choice t * k + j of each row. Within an expert rows are in the order of
                    their choices; those that are left out are past the sum
    position        [T, k] int32, the row of each choice: the inverse of `order`. A choice that is left out has one
                    past the sum of the sizes, which may be R or more
    weights         [T, k] float32, what `combine` multiplies by; 0 where a choice is left out
    probabilities   [T, E] float32, the router's softmax, or None from `arrange`; 0 for tokens left out
    """

    group_sizes: Array
    order: Array
    position: Array
    weights: Array
    probabilities: Array | None = None


def arrange(
    experts: Array,
    weights: Array,
    num_experts: int,
    *,
    mask: Array | None = None,
    rows: int | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    backend: BackendNames = None,
) -> Routing:
    """The rows of the choices of another router.

    experts   [T, k] integers. A number outside 0 to num_experts - 1 leaves that choice out, as `mask` does a token's
    weights   [T, k] floats
    rows      R; None: T * k. Choices that would be past it are left out: the last ones of the highest experts
    mask, checkpoint_name, backend   as `route`'s

    Raises ValueError for shapes or dtypes that do not fit.
    """
    check_arrays(experts=experts, weights=weights)
    if experts.ndim != 2 or experts.shape[1] == 0 or not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(
            f"experts has shape {list(experts.shape)} and dtype {experts.dtype}; give integers [T, k], k one or more"
        )
    if weights.shape != experts.shape or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"weights has shape {list(weights.shape)} and dtype {weights.dtype}; give floats {list(experts.shape)}, "
            "one per choice"
        )
    check_whole("arrange", experts=experts, weights=weights)
    num_experts = as_count("num_experts", num_experts)
    rows = None if rows is None else as_count("rows", rows)
    check_mask(mask, experts.shape[0])
    experts = named(as_int32(experts), checkpoint_name)
    if mask is not None:
        experts = jnp.where(mask[:, None], experts, num_experts)
    return arrange_checked(experts, weights, num_experts, checkpoint_name, backend, rows=rows)


def arrange_checked(
    experts: Array,
    weights: Array,
    num_experts: int,
    checkpoint_name: str | None,
    backend: BackendNames,
    probabilities: Array | None = None,
    rows: int | None = None,
) -> Routing:
    """`arrange` of choices that have been checked and named; `rows` as there."""
    tokens, k = experts.shape
    check_fixed(tokens, "experts")
    if tokens * k >= _MAX_ROWS:
        raise ValueError(f"{tokens} tokens with {k} choices are 2^31 rows or more; route fewer tokens at once")
    route = route_for(num_experts, DeviceAndBackends.of(experts, backend))
    sizes, order, position, routed = (route or _route_by_sorting)(experts, num_experts)
    order, position = named(order, checkpoint_name), named(position, checkpoint_name)
    if rows is not None and rows < tokens * k:
        order, sizes = order[:rows], limited(sizes, rows)
        routed &= position < rows
    return Routing(
        group_sizes=sizes,
        order=order,
        position=position,
        weights=jnp.where(routed, in_fp32(weights), np.float32(0)),
        probabilities=probabilities,
    )


def _route_by_sorting(experts: Array, num_experts: int) -> tuple[Array, Array, Array, Array]:
    """As octavo_registry.contract.moves.Route has it."""
    routed = (experts >= 0) & (experts < num_experts)
    keys = jnp.where(routed, experts, num_experts).astype(jnp.int32).reshape(-1)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    numbers = jnp.arange(keys.size, dtype=jnp.int32)
    position = numbers.at[order].set(numbers, unique_indices=True, mode="promise_in_bounds")
    return counts(keys, num_experts), order, position.reshape(experts.shape), routed


def counts(experts: Array, num_experts: int) -> Array:
    """[num_experts] int32: how often each number occurs; others are not counted."""
    # Counting by comparison: a scatter-add of ones is serialised where XLA must be deterministic.
    return jnp.sum(experts.reshape(-1, 1) == jnp.arange(num_experts, dtype=jnp.int32)[None, :], axis=0, dtype=jnp.int32)


def limited(sizes: Array, rows: int) -> Array:
    """Sizes [E] that sum to `rows` at most: the last groups lose what is too much."""
    return jnp.diff(jnp.minimum(jnp.cumsum(sizes), rows), prepend=0)


def named(x: Array, name: str | None) -> Array:
    check_text("checkpoint_name", name)
    return x if name is None else name_array(x, name)


def check_routing(routing: object) -> None:
    """ValueError for anything but a Routing, and for weights in one that are not one float32 per choice."""
    if not isinstance(routing, Routing):
        raise ValueError(f"routing is a {type(routing).__name__}; give what moe.route or moe.arrange returned")
    weights, wanted = routing.weights, routing.position.shape
    if weights.shape != wanted or jax.dtypes.canonicalize_dtype(weights.dtype) != jnp.float32:
        raise ValueError(
            f"routing.weights has shape {list(weights.shape)} and dtype {weights.dtype}; give float32 {list(wanted)}, "
            "one per choice"
        )


def check_mask(mask: Array | None, tokens: int) -> None:
    if mask is None:
        return
    check_arrays(mask=mask)
    if mask.shape != (tokens,) or mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask has shape {list(mask.shape)} and dtype {mask.dtype}; give bool [{tokens}], False for tokens that "
            "are left out"
        )
