"""A router's scores in fp32, and the share of each in its token's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from octavo.router import Score
from octavo_jax.arithmetic.widening import in_fp32


def router_scores(logits: Array, score: Score) -> Array:
    """float32 [T, E]."""
    wide = in_fp32(logits)
    if score == "softmax":
        return jax.nn.softmax(wide, axis=-1)
    if score == "sigmoid":
        return jax.nn.sigmoid(wide)
    # Below -15, softplus is an exponential in fp32. It underflows at half of the depth at which its root does, and the
    # slope of a root is infinite there.
    small = wide < -15
    root = jnp.sqrt(jax.nn.softplus(jnp.where(small, 0, wide)))
    return jnp.where(small, jnp.exp(0.5 * jnp.where(small, wide, 0)), root)


def score_shares(logits: Array, score: Score) -> Array:
    """float32 [T, E]: each score over the sum of its token's. Scores are multiplied by a factor for each token by which
    the largest does not underflow, however far below 0 its logit is."""
    if score == "softmax":
        return router_scores(logits, score)
    wide = in_fp32(logits)
    lift = lax.stop_gradient(jnp.minimum(jnp.max(wide, axis=-1, keepdims=True), 0))
    if score == "sigmoid":
        negative = wide < 0
        below = jnp.where(negative, wide, lift)
        scores = jnp.where(negative, jnp.exp(below - lift) * jax.nn.sigmoid(-below), jax.nn.sigmoid(wide))
    else:  # below -15, softplus is an exponential in fp32
        small = wide < -15
        root = jnp.sqrt(jax.nn.softplus(jnp.where(small, 0, wide))) * jnp.exp(-0.5 * jnp.maximum(lift, -15))
        scores = jnp.where(small, jnp.exp(0.5 * (jnp.where(small, wide, lift) - lift)), root)
    return scores / jnp.sum(scores, axis=-1, keepdims=True)
