"""Routers: which experts each token goes to, and what each choice counts, as octavo_numerics.choose_experts defines it.

Ties go to the lower index. A backend's functions choose where one serves and one device holds the tokens
(`octavo_jax.moe.moves`); its weights are differentiable once, in reverse. All else is composed of JAX's operations in
fp32, so that JAX differentiates, maps and shards it.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo.router import RouterRule, Score
from octavo_jax.arrays.checks import as_count, check_arrays, check_count
from octavo_jax.arrays.dtypes import dtype_name
from octavo_jax.arrays.exportable import exportable_tuple
from octavo_jax.arrays.numpy_batches import as_jax
from octavo_jax.arrays.sizes import as_int32
from octavo_jax.arrays.varying import varying_alike
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.moe.arrangement import counts, named
from octavo_jax.moe.moves import Choosers, choosers_for
from octavo_jax.sharding.conflicts import check_whole

SCORES: tuple[Score, ...] = get_args(Score)

RULE = tuple(field.name for field in fields(RouterRule))
"""The arguments of a router and of a block that say how it chooses."""

_LIFT = np.float32(2**32)
"""By which both sides of a quotient are multiplied: exact, and the square of a divisor, which the gradient divides by,
neither underflows where the divisor is 1e-20 nor overflows."""

_SMALL = np.float32(1e-20) * _LIFT
"""Added to the sum that weights are divided by, which is 0 where every choice goes nowhere."""

_FP32_MAX = float(np.finfo(np.float32).max)


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


@exportable_tuple
class RouterLosses(NamedTuple):
    """A router's auxiliary losses, float32 scalars without coefficients: octavo_numerics.router_losses defines them."""

    z: Array
    aux: Array
    sequence: Array


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
    return chosen(logits, rule, bias, replay, checkpoint_name, backend)


def checked_rule(
    experts: int,
    k: int,
    *,
    score: Score = "softmax",
    groups: int = 1,
    kept_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
) -> RouterRule:
    """The rule of these arguments of `choose_experts`; ValueError for those that do not fit so many experts."""
    k = as_count("k", k)
    check_score(score)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) <= _FP32_MAX:
        raise ValueError(f"scale is {scale!r}; give a finite number, in fp32, too")
    check_groups(experts, k, groups, kept_groups)
    if not isinstance(renormalize, bool):
        raise ValueError(f"renormalize is {renormalize!r}; give True or False")
    return RouterRule(k, score, groups, kept_groups, renormalize, float(scale))


def chosen(
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
            ordered = ordered + lax.stop_gradient(bias).astype(jnp.float32)[None, :]
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
        bias = lax.stop_gradient(bias).astype(jnp.float32)
    made: tuple[Array, Array, Array] = _chosen(choosers, rule, *varying_alike(as_jax((logits, bias, replay))))
    return made


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chosen(
    choosers: Choosers, rule: RouterRule, logits: Array, bias: Array | None, replay: Array | None
) -> tuple[Array, Array, Array]:
    return choosers.choose(logits, bias, replay, rule)


def _chosen_forward(
    choosers: Choosers, rule: RouterRule, logits: Array, bias: Array | None, replay: Array | None
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
    made = choosers.choose(logits, bias, replay, rule)
    return made, (logits, made[0])


def _chosen_backward(
    choosers: Choosers, rule: RouterRule, saved: tuple[Array, Array], cotangents: tuple[Any, Array, Any]
) -> tuple[Array, None, None]:
    return choosers.gradient(*saved, cotangents[1], rule), None, None


_chosen.defvjp(_chosen_forward, _chosen_backward)


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
        nothing = jnp.sum(logits.astype(jnp.float32))
        return RouterLosses(nothing, nothing, nothing)
    shares = score_shares(logits, score).reshape(sequences, -1, experts)
    runs = choices.reshape(sequences, -1)
    load = jax.vmap(lambda run: counts(run, experts))(runs).astype(jnp.float32) / np.float32(runs.shape[1])
    each = jnp.mean(shares, axis=1)
    # Runs are as long as each other, and so are the parts of devices: the mean of their means is that of all tokens.
    total = jnp.mean(load, axis=0), jnp.mean(each, axis=0)
    z = jnp.mean(jnp.square(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)))
    by_run = jnp.mean(jnp.sum(load * each, axis=-1))
    if axes:
        z, by_run, total = lax.pmean((z, by_run, total), axes)  # type: ignore[no-untyped-call]
    return RouterLosses(z, experts * jnp.sum(total[0] * total[1]), experts * by_run)


def router_scores(logits: Array, score: Score) -> Array:
    """float32 [T, E]."""
    wide = logits.astype(jnp.float32)
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
    wide = logits.astype(jnp.float32)
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


def _logits_to_order(logits: Array) -> Array:
    """Logits, to choose by where nothing else decides: no rounding of a score then makes a tie, or breaks one."""
    return lax.stop_gradient(jnp.where(logits == 0, 0, logits))  # -0 is 0


def _largest(values: Array, k: int, checkpoint_name: str | None) -> Array:
    """int32 [T, k], where the k largest of each row are: NaN before all, and the lower index among equals."""
    _, chosen = lax.top_k(_without_signs_of_nan(values), k)
    return named(chosen.astype(jnp.int32), checkpoint_name)  # before its first use, or the search runs again


def _without_signs_of_nan(values: Array) -> Array:
    """`values` with one NaN for all: XLA orders them by their signs, which no computation means."""
    return jnp.where(jnp.isnan(values), jnp.nan, values)


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


def check_choices(name: str, choices: Array, logits: Array) -> None:
    """ValueError unless `choices`, called `name`, are integers [T, k], at least one for each of the tokens."""
    check_arrays(**{name: choices})
    if choices.ndim != 2 or not jnp.issubdtype(choices.dtype, jnp.integer):
        raise ValueError(
            f"{name} has shape {list(choices.shape)} and dtype {choices.dtype}; give integers [T, k], the expert of "
            "each choice"
        )
    if choices.shape[0] != logits.shape[0] or not choices.shape[1]:
        raise ValueError(
            f"{name} has shape {list(choices.shape)} and logits {list(logits.shape)}; give [{logits.shape[0]}, k], "
            "with at least one choice per token"
        )


def check_groups(experts: int, k: int, groups: int, kept_groups: int) -> None:
    """ValueError for groups that do not divide the experts, and for more choices than a token has."""
    check_count("groups", groups)
    check_count("kept_groups", kept_groups)
    if experts % groups or kept_groups > groups:
        raise ValueError(
            f"groups is {groups}, kept_groups {kept_groups}, and there are {experts} experts; give a divisor of that "
            "number, and at most as many kept ones"
        )
    available = experts // groups * kept_groups
    if k > available:
        raise ValueError(
            f"k is {k} and a token has {available} experts to choose from, as groups is {groups} and kept_groups "
            f"{kept_groups}; give at most that many"
        )


def check_bias(name: str, bias: Array | None, experts: int) -> None:
    """ValueError unless `bias`, called `name`, is None or one float for each of the experts."""
    if bias is None:
        return
    check_arrays(**{name: bias})
    if bias.shape != (experts,):
        raise ValueError(f"{name} has shape {list(bias.shape)}; give [{experts}], one number per expert")
    dtype_name(bias.dtype, name)


def check_logits(logits: Array) -> None:
    check_arrays(logits=logits)
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"logits has shape {list(logits.shape)}; give [T, E], with leading axes flattened")
    dtype_name(logits.dtype, "logits")


def check_score(score: object) -> None:
    """ValueError for a score that there is none of."""
    if not isinstance(score, str) or score not in SCORES:
        raise ValueError(f"score is {score!r}; give one of {', '.join(SCORES)}")
