"""The losses of a router: octavo_numerics.router_losses defines them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo.router import Score
from octavo_jax.arithmetic.widening import in_fp32
from octavo_jax.arrays.checks import check_count
from octavo_jax.arrays.exportable import exportable_tuple
from octavo_jax.moe.arrangement import counts
from octavo_jax.moe.router.checks import check_choices, check_logits
from octavo_jax.moe.router.rule import check_score
from octavo_jax.moe.router.scores import score_shares


@exportable_tuple
class RouterLosses(NamedTuple):
    """A router's auxiliary losses, float32 scalars without coefficients: octavo_numerics.router_losses defines them."""

    z: Array
    aux: Array
    sequence: Array


def router_losses(
    logits: Array,
    choices: Array,
    *,
    score: Score = "softmax",
    sequences: int = 1,
    axes: str | tuple[str, ...] = (),
) -> RouterLosses:
    """The z loss, and those of balance over all tokens and within each of `sequences` runs of tokens of equal length.

    logits, choices   [T, E] and [T, k] of a router; without tokens each loss is 0
    sequences         runs of these tokens
    axes              inside `jax.shard_map`, the mesh axes that spread the tokens, as many to each device: losses are
                      then those of all tokens, the same on every device

    Differentiable in the logits; raises ValueError as `choose_experts` does.
    """
    check_logits(logits)
    check_score(score)
    check_choices("choices", choices, logits)
    check_count("sequences", sequences)
    tokens, experts = logits.shape
    if tokens % sequences:
        raise ValueError(f"sequences is {sequences} and there are {tokens} tokens; give a divisor of that number")
    if not tokens:
        nothing = jnp.sum(in_fp32(logits))
        return RouterLosses(nothing, nothing, nothing)
    shares = score_shares(logits, score).reshape(sequences, -1, experts)
    runs = choices.reshape(sequences, -1)
    load = jax.vmap(lambda run: counts(run, experts))(runs).astype(jnp.float32) / np.float32(runs.shape[1])
    each = jnp.mean(shares, axis=1)
    # Runs are as long as each other, and so are the parts of devices: the mean of their means is that of all tokens.
    total = jnp.mean(load, axis=0), jnp.mean(each, axis=0)
    z = jnp.mean(jnp.square(jax.nn.logsumexp(in_fp32(logits), axis=-1)))
    by_run = jnp.mean(jnp.sum(load * each, axis=-1))
    if axes:
        z, by_run, total = lax.pmean((z, by_run, total), axes)  # type: ignore[no-untyped-call]
    return RouterLosses(z, experts * jnp.sum(total[0] * total[1]), experts * by_run)
