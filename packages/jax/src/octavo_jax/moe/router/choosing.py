"""Which experts each token goes to, and what each choice counts, as octavo_numerics.choose_experts defines it.

Ties go to the lower index. A backend's functions choose where one serves and one device holds the tokens
(`octavo_jax.moe.row_functions`); its weights are differentiable once, in reverse. All else is composed of JAX's
operations in fp32, so that JAX differentiates, maps and shards it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo.router import RouterRule, Score
from octavo_jax.arithmetic import bits as fp32
from octavo_jax.arithmetic.widening import in_fp32
from octavo_jax.arrays.exportable import exportable_tuple
from octavo_jax.arrays.numpy_arrays import as_jax
from octavo_jax.arrays.sizes import as_int32
from octavo_jax.arrays.varying import varying_alike
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.moe.arrangement import counts, named
from octavo_jax.moe.router.checks import check_bias, check_choices, check_logits
from octavo_jax.moe.router.rule import checked_rule
from octavo_jax.moe.router.scores import router_scores
from octavo_jax.moe.row_functions import Choosers, choosers_for
from octavo_jax.sharding.conflicts import check_whole

_LIFT = np.float32(2**32)
"""By which both sides of a quotient are multiplied: exact, and the square of a divisor, which the gradient divides by,
neither underflows where the divisor is 1e-20 nor overflows."""

_SMALL = np.float32(1e-20) * _LIFT
"""Added to the sum that weights are divided by, which is 0 where every choice goes nowhere."""


@exportable_tuple
class Choice(NamedTuple):
    """What a router says of T tokens.

    choices   int32 [T, k], the largest first
    weights   float32 [T, k], differentiable in the logits
    counts    int32 [E], the choices that each expert got; inside `jax.shard_map` those of this device's tokens
    """

    choices: Array
    weights: Array
    counts: Array


def choose_experts(
    logits: Array,
    k: int,
    *,
    score: Score = "softmax",
    bias: Array | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    replay: Array | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    backend: BackendNames = None,
) -> Choice:
    """The k experts of each token by score plus bias, from the largest down, ties to the lower index; never dropped.

    logits            [T, E], bf16, fp16 or fp32
    score             of each logit, in fp32: softmax over the experts, sigmoid, or the root of softplus
    bias              [E], added for choosing alone: weights are without it, and it has no gradient
    groups            the experts are so many runs of equal length, and a token's choices come from the `kept_groups` of
                      them with the largest sums of their two largest scores plus bias, ties to the lower index
    renormalize       divide a token's weights by their sum plus 1e-20
    scale             multiplies the weights
    replay            integers [T, k], choices that were made before: their weights are those of these logits; a number
                      outside 0 to E - 1 is dropped and weighs 0
    checkpoint_name   what policies of `jax.checkpoint` call the choices, as `route`'s; None: no name
    backend           which backends may choose, as in `octavo_jax.moe.route`, whose weights are differentiable once, in
                      reverse; "jax-reference" leaves it to JAX's operations

    Raises ValueError for arguments that do not fit.
    """
    check_logits(logits)
    check_whole("choose_experts", logits=logits)
    experts = int(logits.shape[1])
    rule = checked_rule(
        experts, k, score=score, groups=groups, kept_groups=kept_groups, renormalize=renormalize, scale=scale
    )
    check_bias("bias", bias, experts)
    if replay is not None:
        check_choices("replay", replay, logits)
        if replay.shape[1] != rule.k:
            raise ValueError(
                f"replay has shape {list(replay.shape)} and k is {rule.k}; give {[logits.shape[0], rule.k]}"
            )
        replay = as_int32(replay)
    return choose_checked(logits, rule, bias, replay, checkpoint_name, backend)


def choose_checked(
    logits: Array,
    rule: RouterRule,
    bias: Array | None,
    replay: Array | None,
    checkpoint_name: str | None,
    backend: BackendNames,
) -> Choice:
    """`choose_experts` of arguments that fit, int32 choices among them."""
    choosers = choosers_for(logits, rule, backend)
    if choosers is not None:
        choices, weights, load = _chosen_by(choosers, rule, logits, bias, replay)
        return Choice(choices if replay is not None else named(choices, checkpoint_name), weights, load)
    scores = router_scores(logits, rule.score)
    if replay is None:
        by_logits = bias is None and not rule.by_groups
        ordered = _logits_to_order(logits) if by_logits else lax.stop_gradient(scores)
        if bias is not None:
            ordered = ordered + in_fp32(lax.stop_gradient(bias))[None, :]
        choices = _largest(_in_groups(ordered, rule.groups, rule.kept_groups), rule.k, checkpoint_name)
    else:
        choices = replay
    weights = _picked(scores, choices)
    if rule.renormalize:
        weights = weights * _LIFT
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _SMALL)
    return Choice(choices, weights * np.float32(rule.scale), counts(choices, int(logits.shape[1])))


def _chosen_by(
    choosers: Choosers, rule: RouterRule, logits: Array, bias: Array | None, replay: Array | None
) -> tuple[Array, Array, Array]:
    """Choices, weights and counts by a backend's functions; the weights have a gradient in the logits."""
    if bias is not None:
        bias = in_fp32(lax.stop_gradient(bias))
    results: tuple[Array, Array, Array] = _chosen(choosers, rule, *varying_alike(as_jax((logits, bias, replay))))
    return results


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chosen(
    choosers: Choosers, rule: RouterRule, logits: Array, bias: Array | None, replay: Array | None
) -> tuple[Array, Array, Array]:
    return choosers.choose(logits, bias, replay, rule)


def _chosen_forward(
    choosers: Choosers, rule: RouterRule, logits: Array, bias: Array | None, replay: Array | None
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
    results = choosers.choose(logits, bias, replay, rule)
    return results, (logits, results[0])


def _chosen_backward(
    choosers: Choosers, rule: RouterRule, saved: tuple[Array, Array], cotangents: tuple[Any, Array, Any]
) -> tuple[Array, None, None]:
    return choosers.gradient(*saved, cotangents[1], rule), None, None


_chosen.defvjp(_chosen_forward, _chosen_backward)


def _logits_to_order(logits: Array) -> Array:
    """Logits, to choose by where nothing else decides: no rounding of a score then makes a tie, or breaks one."""
    # By bits, of which -0 is 0: a comparison on a CPU takes subnormal logits for zero, too, and they would tie.
    bits = fp32.widened(lax.stop_gradient(logits))
    return fp32.as_float(jnp.where(bits & fp32.MAGNITUDE == 0, 0, bits))


def _largest(values: Array, k: int, checkpoint_name: str | None) -> Array:
    """int32 [T, k], where the k largest of each row are: NaN before all, and the lower index among equals."""
    _, indices = lax.top_k(_without_signs_of_nan(values), k)
    return named(indices.astype(jnp.int32), checkpoint_name)  # before its first use, or the search runs again


def _without_signs_of_nan(values: Array) -> Array:
    """`values` in fp32 with one NaN for all: XLA orders them by their signs, which no computation means."""
    # by bits: a NaN that is written down would be the first that `jax.debug_nans` finds
    bits = lax.bitcast_convert_type(in_fp32(values), jnp.uint32)
    return lax.bitcast_convert_type(jnp.where(jnp.isnan(values), fp32.NAN, bits), jnp.float32)


def _picked(scores: Array, choices: Array) -> Array:
    """scores [T, k] of the choices; 0 for one that is no expert's."""
    # A comparison and a sum, not a gather: its gradient is one, too, where a gather's scatters.
    experts = scores.shape[1]
    there = choices[:, :, None] == jnp.arange(experts, dtype=jnp.int32)[None, None, :]
    return jnp.sum(jnp.where(there, scores[:, None, :], 0), axis=-1)


def _in_groups(values: Array, groups: int, kept: int) -> Array:
    """`values` with -inf outside of the kept groups of each token."""
    if kept >= groups:
        return values
    tokens, experts = values.shape
    grouped = values.reshape(tokens, groups, experts // groups)
    best, _ = lax.top_k(_without_signs_of_nan(grouped), min(2, experts // groups))
    inside_of = _largest(jnp.sum(best, axis=-1), kept, None)
    inside = jnp.any(inside_of[:, :, None] == jnp.arange(groups, dtype=jnp.int32)[None, None, :], axis=1)
    return jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(values.shape)
