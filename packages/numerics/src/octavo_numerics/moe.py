"""What a MoE layer adds to its products: its router, its experts' activations, and rows that are kept as codes.

Scores of a router are softmax (Shazeer et al., arXiv 1701.06538), sigmoid with a bias that chooses only (Wang et al.,
arXiv 2408.15664) and groups of experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), or the root of softplus. GELU is
arXiv 1606.08415, the gated units are arXiv 2002.05202, squared ReLU is arXiv 2109.08668, and the clamped SwiGLU is that
of gpt-oss (arXiv 2508.10925), with the gradients of torch's clamp: 1 at a limit, 0 past it. Kept rows are
1x128 blocks of E4M3 with a power of two as scale (`octavo.quantizer.KEPT_ROWS`), as DeepSeek-V3 keeps activations
(section 3.3.3 there).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.quantizer import KEPT_ROWS
from octavo_numerics.dequantize import dequantize
from octavo_numerics.quantize import quantize

_BLOCK = 128
_RELATIVE = 2.0**-4  # half a step of E4M3, relative to its normal values
_SUBNORMAL = 2.0**-10  # half a step of its subnormal ones
_LEAST_DECODED = 2.0**-127  # a block's decode scale: the encode scale is 2^127 at most

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh", "clamped_swiglu"]
F64 = NDArray[np.float64]

_GATED = frozenset({"swiglu", "geglu", "geglu_tanh", "clamped_swiglu"})
_ALPHA = 1.702  # of clamped_swiglu's sigmoid, which makes of silu an approximation of GELU
_LIMIT = 7.0
_CUBIC = 0.044715
_FAR = 1000.0  # where a sigmoid and a Gaussian are 0 or 1 in float64

_erfc = np.vectorize(math.erfc, otypes=[np.float64])  # 1 + erf(x) would cancel for negative x


class Choice(NamedTuple):
    """choices int64 [T, k], their weights float64 [T, k], and counts int64 [E], the tokens of each expert."""

    choices: NDArray[np.int64]
    weights: NDArray[np.float64]
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class RouterRule:
    """How a router chooses.

    k                     choices of each token, by score plus bias from the largest down, ties to the lower index; by
                          logit where neither a bias nor groups decide, for scores of two logits may round to one
    score                 of each logit: over a token's experts, or of each on its own
    groups, kept_groups   the experts are `groups` runs of equal length, of which a token's choices come from the
                          `kept_groups` with the largest sums of their two largest scores plus bias, ties likewise
    renormalize           weights are divided by their sum over a token's choices plus 1e-20
    scale                 multiplies the weights
    """

    k: int
    score: Score = "softmax"
    groups: int = 1
    kept_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0


def route_scores(logits: NDArray[Any], score: Score) -> NDArray[np.float64]:
    """The scores of logits [T, E]."""
    wide = logits.astype(np.float64)
    if score == "softmax":
        powers = np.exp(wide - wide.max(-1, keepdims=True))
        return np.asarray(powers / powers.sum(-1, keepdims=True))
    if score == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-wide)))
    return np.asarray(np.sqrt(np.logaddexp(0, wide)))


def choose_experts(
    logits: NDArray[Any],
    rule: RouterRule,
    bias: NDArray[Any] | None = None,
    replay: NDArray[Any] | None = None,
) -> Choice:
    """The choices for logits [T, E], in float64.

    bias     [E], added to the scores for choosing; weights are without it
    replay   [T, k], choices to take in the place of those; -1 goes nowhere, and weighs 0
    """
    tokens, experts = logits.shape
    scores = route_scores(logits, rule.score)
    chosen_by = scores if bias is None else scores + bias
    if bias is None and rule.kept_groups >= rule.groups:
        chosen_by = logits.astype(np.float64)  # of which each score is an increasing function, but for rounding
    if replay is None:
        if rule.kept_groups < rule.groups:
            grouped = chosen_by.reshape(tokens, rule.groups, experts // rule.groups)
            sums = np.sort(grouped, -1)[..., -2:].sum(-1)
            kept = np.argsort(-sums, -1, kind="stable")[:, : rule.kept_groups]
            outside = np.ones((tokens, rule.groups), bool)
            np.put_along_axis(outside, kept, False, 1)
            chosen_by = np.where(np.repeat(outside, experts // rule.groups, 1), -np.inf, chosen_by)
        replay = np.argsort(-chosen_by, -1, kind="stable")[:, : rule.k]
    choices = replay.astype(np.int64)
    there = (choices >= 0) & (choices < experts)
    weights = np.where(there, np.take_along_axis(scores, np.where(there, choices, 0), 1), 0.0)
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    counts = np.bincount(choices[there], minlength=experts).astype(np.int64)
    return Choice(choices, weights * rule.scale, counts)


def router_losses(logits: NDArray[Any], choice: Choice, score: Score, sequences: int = 1) -> dict[str, float]:
    """The auxiliary losses of a router, without their coefficients.

    z           mean over tokens of logsumexp(logits)^2 (Zoph et al., arXiv 2202.08906)
    aux         E sum_e f_e P_e, f_e the share of all choices that expert e got, P_e the mean over tokens of its share
                of their scores (Fedus et al., arXiv 2101.03961)
    sequence    the same within each of `sequences` runs of tokens of equal length, averaged over these

    Without tokens each is 0.
    """
    if not logits.shape[0]:
        return {"z": 0.0, "aux": 0.0, "sequence": 0.0}
    wide = logits.astype(np.float64)
    largest = wide.max(-1, keepdims=True)
    total = np.log(np.exp(wide - largest).sum(-1)) + largest[:, 0]
    scores = route_scores(logits, score)
    shares = scores / scores.sum(-1, keepdims=True)
    experts = wide.shape[1]

    def balance(choices: NDArray[np.int64], parts: NDArray[np.float64]) -> float:
        there = choices[(choices >= 0) & (choices < experts)]
        counts = np.bincount(there, minlength=experts)
        return float(experts * (counts / choices.size * parts.mean(0)).sum())

    runs = zip(np.split(choice.choices, sequences), np.split(shares, sequences), strict=True)
    return {
        "z": float((total**2).mean()),
        "aux": balance(choice.choices, shares),
        "sequence": float(np.mean([balance(*run) for run in runs])),
    }


class ActivationParts(NamedTuple):
    """What an activation of rows [M, C] is made of, each float64 [M, F].

    value, slope   act(gate) and its derivative; without a gate act(x)
    factor         what multiplies it: the up projection, clamped and plus one in clamped_swiglu; 1 without a gate
    passes         the derivative of `factor` in the up projection, 1 or 0; 0 without a gate
    """

    value: F64
    slope: F64
    factor: F64
    passes: F64


# Infinities give the limit: a factor of at most _FAR in magnitude is multiplied with what is 0 there.


def _logistic(x: F64, v: F64, inner: F64) -> tuple[F64, F64]:
    """x sigmoid(v(x)) and its derivative; `inner` is x v'(x)."""
    with np.errstate(over="ignore"):
        s, rest = 1 / (1 + np.exp(-v)), 1 / (1 + np.exp(v))
    return np.maximum(x, -_FAR) * s, s * (1 + inner * rest)


def _silu(x: F64, alpha: float = 1.0) -> tuple[F64, F64]:
    v = alpha * np.clip(x, -_FAR, _FAR)
    return _logistic(x, v, v)


def _gelu(x: F64) -> tuple[F64, F64]:
    near, below = np.clip(x, -_FAR, _FAR), 0.5 * _erfc(-x / math.sqrt(2))
    slope = below + near * np.exp(-near * near / 2) / math.sqrt(2 * math.pi)
    return np.maximum(x, -_FAR) * below, slope


def _gelu_tanh(x: F64) -> tuple[F64, F64]:
    # (1 + tanh(u)) / 2 is the sigmoid of 2 u
    near, factor = np.clip(x, -_FAR, _FAR), 2 * math.sqrt(2 / math.pi)
    return _logistic(x, factor * (near + _CUBIC * near**3), factor * (near + 3 * _CUBIC * near**3))


def _relu2(x: F64) -> tuple[F64, F64]:
    positive = np.maximum(x, 0)
    return positive * positive, 2 * positive


def _clamped(x: F64) -> tuple[F64, F64]:
    value, slope = _silu(np.minimum(x, _LIMIT), _ALPHA)
    return value, np.where(x > _LIMIT, 0, slope)


_FUNCTIONS: dict[Activation, Callable[[F64], tuple[F64, F64]]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
    "swiglu": _silu,
    "geglu": _gelu,
    "geglu_tanh": _gelu_tanh,
    "clamped_swiglu": _clamped,
}
"""Value and derivative of x, or of a gated activation's gate."""


def activation_parts(x: NDArray[Any], activation: Activation) -> ActivationParts:
    """The parts of `activation` of x [M, C]: [M, F] where it has no gate, else [M, 2 F] with the gates first.

    ValueError for an unknown name, or an odd number of columns of a gated one.
    """
    if activation not in get_args(Activation):
        raise ValueError(f"activation is {activation!r}; give one of {', '.join(get_args(Activation))}")
    wide = x.astype(np.float64)
    if activation not in _GATED:
        value, slope = _FUNCTIONS[activation](wide)
        return ActivationParts(value, slope, np.ones_like(wide), np.zeros_like(wide))
    if x.shape[-1] % 2:
        raise ValueError(f"x has {x.shape[-1]} columns and {activation} reads gates and an up projection; give 2 F")
    gate, up = np.split(wide, 2, axis=-1)
    value, slope = _FUNCTIONS[activation](gate)
    if activation != "clamped_swiglu":
        return ActivationParts(value, slope, up, np.ones_like(up))
    passes = np.where(np.abs(up) > _LIMIT, 0.0, 1.0)
    return ActivationParts(value, slope, np.clip(up, -_LIMIT, _LIMIT) + 1, passes)


def activate(x: NDArray[Any], activation: Activation, probs: NDArray[Any] | None = None) -> F64:
    """act(x), or of x = [gate, up] act(gate) up, in float64: [M, F] of x [M, C]; probs [M] multiply the rows.

    clamped_swiglu is g sigmoid(1.702 g) (u + 1), with g = min(gate, 7) and u = up clamped to [-7, 7]. Raises as
    `activation_parts` does.
    """
    parts = activation_parts(x, activation)
    value = parts.value * parts.factor
    return value if probs is None else value * probs[:, None].astype(np.float64)


def activate_gradient(
    dy: NDArray[Any], x: NDArray[Any], activation: Activation, probs: NDArray[Any] | None = None
) -> F64:
    """The gradient of x [M, C] from dy [M, F], what `activate` returned, in float64. Raises as `activation_parts`."""
    parts, grad = activation_parts(x, activation), dy.astype(np.float64)
    if probs is not None:
        grad = grad * probs[:, None].astype(np.float64)
    gradient = grad * parts.slope * parts.factor
    if activation not in _GATED:
        return gradient
    return np.concatenate([gradient, grad * parts.value * parts.passes], axis=-1)


def keep_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """`rows` [M, N] as backward reads them: quantized, dequantized, and rounded once to their own dtype.

    In fp16 a value that would decode to more than its largest finite one is that. A block with a value that is not
    finite comes back as NaN.
    """
    values = dequantize(quantize(rows, KEPT_ROWS))
    if rows.dtype == np.float16:
        largest = np.float32(np.finfo(np.float16).max)
        values = np.clip(values, -largest, largest)
    with np.errstate(over="ignore"):
        return values.astype(rows.dtype)


def kept_rows_bound(rows: NDArray[Any]) -> NDArray[np.float64]:
    """What |keep_rows(rows) - rows| is at most, for each element of rows [M, N] below 0.94 of the dtype's largest.

    The scale s of a block is a power of two above 224 / amax and at most 448 / amax. An error is
    half a step of E4M3, 2^-4 |x| in its normal range and 2^-10 / s below it, and half a step of the dtype's subnormals.
    """
    wide = np.abs(rows.astype(np.float64))
    blocks = range(0, rows.shape[1], _BLOCK)
    amax = np.concatenate([np.broadcast_to(part.max(1, keepdims=True), part.shape) for part in _parts(wide, blocks)], 1)
    step = _SUBNORMAL * np.maximum(amax / 224, _LEAST_DECODED)
    smallest = float(_finfo(rows.dtype).smallest_subnormal)
    bound: NDArray[np.float64] = np.maximum(_RELATIVE * wide, step) + smallest / 2
    return bound


def _finfo(dtype: np.dtype[Any]) -> Any:
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def _parts(rows: NDArray[np.float64], blocks: range) -> list[NDArray[np.float64]]:
    return [rows[:, start : start + _BLOCK] for start in blocks]
