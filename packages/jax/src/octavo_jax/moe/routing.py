"""Which experts each token goes to, and how evenly a router spreads."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo.renamed import renamed_arguments
from octavo.router import RouterRule
from octavo_jax.arrays.exportable import exportable_tuple
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.moe.arrangement import Routing, arrange_checked, check_mask, check_routing
from octavo_jax.moe.router.checks import check_logits
from octavo_jax.moe.router.choosing import choose_checked
from octavo_jax.moe.router.rule import checked_rule
from octavo_jax.moe.router.scores import score_shares
from octavo_jax.sharding.conflicts import check_whole


class RouterOutput(NamedTuple):
    """What a router says of T tokens, before their choices are arranged as rows.

    experts   [T, k] int32; the number of experts for the choices of tokens that are left out
    weights   [T, k] float32, 0 where a token is left out
    shares    [T, E] float32, each score over the sum of its token's, 0 for tokens that are left out
    """

    experts: Array
    weights: Array
    shares: Array


@exportable_tuple
class RouterStats(NamedTuple):
    """How evenly a router spreads; over all tokens of a mesh where the block is sharded.

    load           [E] int32, rows of each expert
    balance_loss   float32 scalar, experts * sum over e of (share of the rows) * (mean share of the scores), 1 where
                   both are even (Fedus et al. 2021, equations 4 to 6, each of the k choices counted); a softmax's
                   shares are its probabilities. Add it to the loss with a small weight; its gradient reaches the router
                   through the scores. The mean is over the tokens that the mask leaves in, also over those whose
                   choices are nobody's
    dropped        int32 scalar, choices that got no row (`octavo_jax.moe.Exchange.rows`); None where nothing limits
                   the rows, and so nothing is dropped
    """

    load: Array
    balance_loss: Array
    dropped: Array | None = None


@renamed_arguments(normalize="renormalize")
def route(
    logits: Array,
    k: int,
    *,
    renormalize: bool = True,
    mask: Array | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    backend: BackendNames = None,
) -> Routing:
    """Each token's k most probable experts, by their logits: of equal ones the lower number.

    logits            [T, E] scores; the softmax is taken in float32
    renormalize       divide a token's k weights by their sum. With k = 1 they then are 1, and the router learns from
                      the balance loss alone
    mask              [T] bool, False for tokens that are dropped: their rows are past the sum of the sizes, so that
                      they add no row to a GEMM, and their logits are not read
    checkpoint_name   what policies of `jax.checkpoint` call the choices and their order (12 bytes per choice; weights
                      and probabilities are computed again). It is the quantizers' name by default, because rows
                      that were quantized in one order must not meet sizes of another, which a router that is computed
                      again in other fusions could give; None: no name
    backend           which backends may choose and sort, as in `octavo_jax.grouped_dense`; JAX's operations do where
                      none can, and where several devices of a mesh may hold parts of an array

    Raises ValueError for shapes, dtypes or a k that do not fit.
    """
    check_logits(logits)
    check_whole("route", logits=logits)
    check_mask(mask, logits.shape[0])
    rule = checked_rule(int(logits.shape[1]), k, renormalize=renormalize)
    choices = choose_unmasked(logits, rule, mask=mask, checkpoint_name=checkpoint_name, backend=backend)
    return arrange_checked(choices.experts, choices.weights, logits.shape[1], checkpoint_name, backend, choices.shares)


def choose_unmasked(
    logits: Array,
    rule: RouterRule,
    *,
    bias: Array | None = None,
    replay: Array | None = None,
    mask: Array | None,
    checkpoint_name: str | None,
    backend: BackendNames,
) -> RouterOutput:
    """`octavo_jax.choose_experts` of the tokens that `mask` leaves in; the others go to no expert."""
    if mask is not None:
        logits = jnp.where(mask[:, None], logits, 0)
    experts, weights, _ = choose_checked(logits, rule, bias, replay, checkpoint_name, backend)
    shares = score_shares(logits, rule.score)
    if mask is not None:
        experts = jnp.where(mask[:, None], experts, logits.shape[1])
        weights = jnp.where(mask[:, None], weights, 0)
        shares = jnp.where(mask[:, None], shares, 0)
    return RouterOutput(experts, weights, shares)


def router_stats(routing: Routing) -> RouterStats:
    """Load and balance loss of what `route` returned; ValueError where `arrange` did, which sees no probabilities."""
    check_routing(routing)
    if routing.probabilities is None:
        raise ValueError("routing has no probabilities, because arrange made it; the balance loss needs those of route")
    # A token that is left out has k choices too few and shares of 0.
    tokens = jnp.sum(routing.group_sizes) / routing.weights.shape[1]
    return stats_of(routing.group_sizes, jnp.sum(routing.probabilities, axis=0), tokens)


def stats_of(load: Array, shares: Array, tokens: Array) -> RouterStats:
    """The statistics of rows [E] and of the sums over so many tokens of their shares [E]."""
    share = load.astype(jnp.float32) / jnp.maximum(jnp.sum(load), 1).astype(jnp.float32)
    return RouterStats(load, len(load) * jnp.sum(share * shares / jnp.maximum(tokens, 1).astype(jnp.float32)))
