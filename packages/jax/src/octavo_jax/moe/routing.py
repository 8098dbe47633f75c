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
    """T tokens with k choices each among E experts, as R rows that are sorted by expert. R is T * k, or fewer if asked.

    group_sizes     [E] int32, rows of each expert. Their sum is T * k, less the choices that are left out
    order           [R] int32, the choice t * k + j that stands in each row. Within an expert rows are in the order of
                    their choices; those that are left out stand past the sum
    position        [T, k] int32, the row of each choice: the inverse of `order`. A choice that is left out has one
                    past the sum of the sizes, which may be R or more
    weights         [T, k] float32, what `combine` multiplies by; 0 where a choice is left out
    probabilities   [T, E] float32, the router's softmax, or None where `arrange` made this; 0 for tokens left out
    """

    group_sizes: Array
    order: Array
    position: Array
    weights: Array
    probabilities: Array | None = None


class Choices(NamedTuple):
    """A router's answer before the rows are arranged.

    experts         [T, k] int32; the number of experts for the choices of tokens that are left out
    weights         [T, k] float32, 0 where a token is left out
    probabilities   [T, E] float32, 0 for tokens that are left out
    """

    experts: Array
    weights: Array
    probabilities: Array


class RouterStats(NamedTuple):
    """How evenly a router spreads; over all tokens of a mesh where the block is sharded.

    load           [E] int32, rows of each expert
    balance_loss   float32 scalar, experts * sum over e of (share of the rows) * (mean probability): 1 where both are
                   even (Fedus et al. 2021, equations 4 to 6, each of the k choices counted). Add it to the loss with a
                   small weight; its gradient reaches the router through the probabilities
    dropped        int32 scalar, choices that found no row (`octavo_jax.moe.Exchange.rows`); None where nothing limits
                   the rows, and so nothing is dropped
    """

    load: Array
    balance_loss: Array
    dropped: Array | None = None


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
    choices = choose(logits, k, normalize=normalize, mask=mask, checkpoint_name=checkpoint_name)
    return arranged(choices.experts, choices.weights, logits.shape[1], checkpoint_name, choices.probabilities)


def choose(logits: Array, k: int, *, normalize: bool, mask: Array | None, checkpoint_name: str | None) -> Choices:
    """What `route` arranges; the arguments are `route`'s."""
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
        chosen = jnp.where(mask[:, None], chosen, experts)
        weights = jnp.where(mask[:, None], weights, 0)
        probabilities = jnp.where(mask[:, None], probabilities, 0)
    return Choices(chosen, weights, probabilities)


def arrange(
    experts: Array,
    weights: Array,
    num_experts: int,
    *,
    mask: Array | None = None,
    rows: int | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
) -> Routing:
    """The rows of choices that another router made.

    experts   [T, k] integers. A number outside 0 to num_experts - 1 leaves that choice out, as `mask` does a token's
    weights   [T, k] floats
    rows      R; None: T * k. Choices that would stand past it are left out: the last ones of the highest experts
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
    if rows is not None and rows < 1:
        raise ValueError(f"rows is {rows}; give one or more, or None for one a choice")
    _check_mask(mask, experts.shape[0])
    experts = _named(experts, checkpoint_name)
    if mask is not None:
        experts = jnp.where(mask[:, None], experts, num_experts)
    return arranged(experts, weights, num_experts, checkpoint_name, rows=rows)


def router_stats(routing: Routing) -> RouterStats:
    """Load and balance loss of what `route` returned; ValueError where `arrange` did, which sees no probabilities."""
    if routing.probabilities is None:
        raise ValueError("routing has no probabilities, because arrange made it; the balance loss needs those of route")
    return stats_of(routing.group_sizes, jnp.sum(routing.probabilities, axis=0), routing.weights.shape[1])


def stats_of(load: Array, probabilities: Array, k: int) -> RouterStats:
    """The statistics of rows [E] and the tokens' summed probabilities [E], k choices a token."""
    rows = jnp.maximum(jnp.sum(load), 1).astype(jnp.float32)
    share = load.astype(jnp.float32) / rows
    # A token that is left out has k choices too few and probabilities of 0.
    return RouterStats(load, len(load) * jnp.sum(share * probabilities / (rows / k)))


def arranged(
    experts: Array,
    weights: Array,
    num_experts: int,
    checkpoint_name: str | None,
    probabilities: Array | None = None,
    rows: int | None = None,
) -> Routing:
    """`arrange` of choices that are checked and named; `rows` as there."""
    tokens, k = experts.shape
    if tokens * k >= _MAX_ROWS:
        raise ValueError(f"{tokens} tokens with {k} choices are 2^31 rows or more; route fewer tokens at once")
    taken = (experts >= 0) & (experts < num_experts)
    keys = jnp.where(taken, experts, num_experts).astype(jnp.int32).reshape(-1)
    order = _named(jnp.argsort(keys, stable=True).astype(jnp.int32), checkpoint_name)
    numbers = jnp.arange(tokens * k, dtype=jnp.int32)
    position = numbers.at[order].set(numbers, unique_indices=True, mode="promise_in_bounds")
    sizes = counts(keys, num_experts)
    if rows is not None and rows < tokens * k:
        order, sizes = order[:rows], limited(sizes, rows)
    return Routing(
        group_sizes=sizes,
        order=order,
        position=_named(position.reshape(tokens, k), checkpoint_name),
        weights=jnp.where(taken, weights.astype(jnp.float32), np.float32(0)),
        probabilities=probabilities,
    )


def counts(experts: Array, num_experts: int) -> Array:
    """[num_experts] int32: how often each number occurs; others are not counted."""
    # Counting by comparison: a scatter-add of ones is serialised where XLA must be deterministic.
    return jnp.sum(experts.reshape(-1, 1) == jnp.arange(num_experts, dtype=jnp.int32), axis=0, dtype=jnp.int32)


def limited(sizes: Array, rows: int) -> Array:
    """Sizes [E] that sum to `rows` at most: the last groups lose what is too much."""
    return jnp.diff(jnp.minimum(jnp.cumsum(sizes), rows), prepend=0)


def _named(x: Array, name: str | None) -> Array:
    return x if name is None else name_array(x, name)


def _check_mask(mask: Array | None, tokens: int) -> None:
    if mask is not None and (mask.shape != (tokens,) or mask.dtype != jnp.bool_):
        raise ValueError(
            f"mask has shape {list(mask.shape)} and dtype {mask.dtype}; give bool [{tokens}], False for tokens that "
            "are left out"
        )
