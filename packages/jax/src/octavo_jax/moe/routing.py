"""Which expert each token goes to, and the row where each choice stands: static shapes, nothing is dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.checkpoint_names import name_array

_MAX_ROWS = 1 << 31


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """T tokens with k choices each among E experts, as R = T * k rows that are sorted by expert.

    group_sizes     [E] int32, rows of each expert. Their sum is R, less the choices that are left out
    order           [R] int32, the choice t * k + j that stands in each row. Within an expert rows are in the order of
                    their choices; those that are left out stand past the sum
    position        [T, k] int32, the row of each choice: the inverse of `order`
    weights         [T, k] float32, what `combine` multiplies by; 0 where a choice is left out
    probabilities   [T, E] float32, the router's softmax, or None where `arrange` made this; 0 for tokens left out
    """

    group_sizes: Array
    order: Array
    position: Array
    weights: Array
    probabilities: Array | None = None


class RouterStats(NamedTuple):
    """How evenly a router spreads.

    load           [E] int32, rows of each expert
    balance_loss   float32 scalar, experts * sum over e of (share of the rows) * (mean probability): 1 where both are
                   even (Fedus et al. 2021, equations 4 to 6, each of the k choices counted). Add it to the loss with a
                   small weight; its gradient reaches the router through the probabilities
    """

    load: Array
    balance_loss: Array


def route(
    logits: Array,
    k: int,
    *,
    normalize: bool = True,
    mask: Array | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
) -> Routing:
    """Each token's k most probable experts; of equal ones the lower number.

    logits            [T, E] scores; the softmax is taken in float32
    normalize         divide a token's k weights by their sum. With k = 1 they then are 1, and the router learns from
                      the balance loss alone
    mask              [T] bool, False for tokens that go nowhere: they stand past the sum of the sizes, cost no row of a
                      GEMM, and their logits are not read
    checkpoint_name   what policies of `jax.checkpoint` call the choices and their order (12 bytes a choice; weights and
                      probabilities are computed again). It is the quantizers' name by default, because rows that were
                      quantized in one order must not meet sizes of another, which a router that is computed again in
                      other fusions could give; None: no name

    Raises ValueError for shapes, dtypes or a k that do not fit.
    """
    if logits.ndim != 2 or logits.shape[1] == 0 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"logits has shape {list(logits.shape)} and dtype {logits.dtype}; give floats [T, E], one or more experts, "
            "with leading axes flattened"
        )
    tokens, experts = logits.shape
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= experts:
        raise ValueError(f"k is {k!r} and there are {experts} experts; give an integer from 1 to {experts}")
    _check_mask(mask, tokens)
    if mask is not None:
        logits = jnp.where(mask[:, None], logits, 0)
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    _, chosen = lax.top_k(lax.stop_gradient(probabilities), k)
    chosen = _named(chosen.astype(jnp.int32), checkpoint_name)  # before its first use, or the search runs again
    # A comparison and a sum, not a gather: its gradient is one, too, where a gather's scatters.
    picked = chosen[:, :, None] == jnp.arange(experts, dtype=jnp.int32)
    weights = jnp.sum(jnp.where(picked, probabilities[:, None, :], 0), axis=-1)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    if mask is not None:
        probabilities = jnp.where(mask[:, None], probabilities, 0)
    return _arranged(chosen, weights, experts, mask, checkpoint_name, probabilities)


def arrange(
    experts: Array,
    weights: Array,
    num_experts: int,
    *,
    mask: Array | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
) -> Routing:
    """The rows of choices that another router made.

    experts   [T, k] integers. A number outside 0 to num_experts - 1 leaves that choice out, as `mask` does a token's
    weights   [T, k] floats
    mask, checkpoint_name   as `route`'s

    Raises ValueError for shapes or dtypes that do not fit.
    """
    if experts.ndim != 2 or experts.shape[1] == 0 or not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(
            f"experts has shape {list(experts.shape)} and dtype {experts.dtype}; give integers [T, k], k one or more"
        )
    if weights.shape != experts.shape or not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"weights has shape {list(weights.shape)} and dtype {weights.dtype}; give floats {list(experts.shape)}, "
            "one a choice"
        )
    if num_experts < 1:
        raise ValueError(f"num_experts is {num_experts}; give one or more")
    _check_mask(mask, experts.shape[0])
    return _arranged(_named(experts, checkpoint_name), weights, num_experts, mask, checkpoint_name, None)


def router_stats(routing: Routing) -> RouterStats:
    """Load and balance loss of what `route` returned; ValueError where `arrange` did, which sees no probabilities."""
    if routing.probabilities is None:
        raise ValueError("routing has no probabilities, because arrange made it; the balance loss needs those of route")
    experts, (tokens, k) = len(routing.group_sizes), routing.weights.shape
    rows = jnp.maximum(jnp.sum(routing.group_sizes), 1).astype(jnp.float32)
    share = routing.group_sizes.astype(jnp.float32) / rows
    # A token that is left out has k choices too few and probabilities of 0.
    mean = jnp.sum(routing.probabilities, axis=0) / (rows / k) if tokens else jnp.zeros(experts, jnp.float32)
    return RouterStats(routing.group_sizes, experts * jnp.sum(share * mean))


def _arranged(
    experts: Array,
    weights: Array,
    num_experts: int,
    mask: Array | None,
    checkpoint_name: str | None,
    probabilities: Array | None,
) -> Routing:
    tokens, k = experts.shape
    if tokens * k >= _MAX_ROWS:
        raise ValueError(f"{tokens} tokens with {k} choices are 2^31 rows or more; route fewer tokens at once")
    taken = (experts >= 0) & (experts < num_experts)
    if mask is not None:
        taken &= mask[:, None]
    keys = jnp.where(taken, experts, num_experts).astype(jnp.int32).reshape(-1)
    order = _named(jnp.argsort(keys, stable=True).astype(jnp.int32), checkpoint_name)
    rows = jnp.arange(tokens * k, dtype=jnp.int32)
    position = rows.at[order].set(rows, unique_indices=True, mode="promise_in_bounds")
    # Counting by comparison: a scatter-add of ones is serialised where XLA must be deterministic.
    sizes = jnp.sum(keys[:, None] == jnp.arange(num_experts, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    return Routing(
        group_sizes=sizes,
        order=order,
        position=_named(position.reshape(tokens, k), checkpoint_name),
        weights=jnp.where(taken, weights.astype(jnp.float32), np.float32(0)),
        probabilities=probabilities,
    )


def _named(x: Array, name: str | None) -> Array:
    return x if name is None else name_array(x, name)


def _check_mask(mask: Array | None, tokens: int) -> None:
    if mask is not None and (mask.shape != (tokens,) or mask.dtype != jnp.bool_):
        raise ValueError(
            f"mask has shape {list(mask.shape)} and dtype {mask.dtype}; give bool [{tokens}], False for tokens that "
            "are left out"
        )
