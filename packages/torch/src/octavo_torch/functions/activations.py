"""Activations and their gradients: computed in fp32 or wider, rounded once to the input's dtype.

silu (as arithmetic.elementwise has it) and relu2 are fp32 throughout; the two GELUs and the clamped SwiGLU gate, which
an fp32 rounding of the argument would spoil far below zero, are computed in fp64 and rounded to fp32. An infinity gives
the limit, NaN gives NaN. Below 2^-120 a result may be zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from octavo.errors import one_of
from octavo_registry.contract.cards import GATED, Activation
from octavo_torch.arithmetic.elementwise import sigmoid, silu
from octavo_torch.compiler.operators import Operators

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
"""Names: gelu and geglu are with erf, gelu_tanh and geglu_tanh with tanh, clamped_swiglu is gpt-oss's."""

_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR
_ALPHA, _LIMIT = 1.702, 7.0  # of the clamped SwiGLU


class ValueAndSlope(NamedTuple):
    """An activation, a new fp32 tensor, and its derivative."""

    value: Tensor
    slope: Callable[[], Tensor]


def _silu(x: Tensor) -> ValueAndSlope:
    def slope() -> Tensor:
        s = sigmoid(x)
        return s * (1 + x.clamp(-200.0, 200.0) * (1 - s))

    return ValueAndSlope(silu(x.clamp(min=-200.0)), slope)


def _gelu(x: Tensor) -> ValueAndSlope:
    near = x.clamp(-40.0, 40.0).double()
    below = torch.special.erfc(near * -math.sqrt(0.5)) * 0.5
    return ValueAndSlope(
        (x.clamp(min=-40.0) * below).float(),
        lambda: (below + near * torch.exp(near * near * -0.5) * (1 / math.sqrt(2 * math.pi))).float(),
    )


def _gelu_tanh(x: Tensor) -> ValueAndSlope:
    near = x.clamp(-20.0, 20.0).double()
    square = near * near
    s = torch.sigmoid(near * (_LINEAR + _CUBIC * square))
    return ValueAndSlope(
        (x.clamp(min=-20.0) * s).float(),
        lambda: (s + near * s * (1 - s) * (_LINEAR + 3 * _CUBIC * square)).float(),
    )


def _relu2(x: Tensor) -> ValueAndSlope:
    positive = x.clamp(min=0.0)
    return ValueAndSlope(positive * positive, lambda: positive + positive)


def _clamped(x: Tensor) -> ValueAndSlope:
    near = x.clamp(-120.0, _LIMIT)
    s = near.double().mul_(_ALPHA).sigmoid_()

    def slope() -> Tensor:
        inside = (s * (1 + (1 - s) * near * _ALPHA)).float()
        return inside.masked_fill_(x > _LIMIT, 0.0)

    return ValueAndSlope((near * s).float(), slope)


_PARTS: dict[str, Callable[[Tensor], ValueAndSlope]] = {
    "silu": _silu,
    "swiglu": _silu,
    "gelu": _gelu,
    "geglu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "geglu_tanh": _gelu_tanh,
    "relu2": _relu2,
    "clamped_swiglu": _clamped,
}
"""The function of x, or of a gated activation's gate."""


def check_activation(activation: object) -> Activation:
    """`activation`; ValueError for a name that is none."""
    return one_of("activation", activation, ACTIVATIONS)


def features(columns: int, activation: Activation, what: str) -> int:
    """F of an activation's input of `columns` columns; ValueError, naming `what`, where a gate has no partner."""
    if activation not in GATED:
        return columns
    if columns % 2:
        raise ValueError(
            f"{what} has {columns} columns and {activation} reads a gate and an up projection side by side; give 2 F"
        )
    return columns // 2


def _split(x: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    """fp32 x, or its gate; and the factor of a gate, in x's dtype or fp32: a product with it is fp32."""
    if activation not in GATED:
        return x.float(), None
    half = x.shape[-1] // 2
    up = x[..., half:]
    if activation == "clamped_swiglu":
        up = up.float().clamp(-_LIMIT, _LIMIT).add_(1.0)
    return x[..., :half].float(), up


def _value(x: Tensor, activation: str) -> Tensor:
    gate, up = _split(x, activation)
    value = _PARTS[activation](gate).value
    return value if up is None else value.mul_(up)


def _activate(x: Tensor, probs: Tensor | None, activation: str) -> Tensor:
    value = _value(x, activation)
    return (value if probs is None else value.mul_(probs[..., None])).to(x.dtype)


def _activate_gradient(dy: Tensor, x: Tensor, probs: Tensor | None, activation: str) -> Tensor:
    gate, up = _split(x, activation)
    parts = _PARTS[activation](gate)
    grad = dy.float() if probs is None else dy.float() * probs[..., None]
    if up is None:
        return (grad * parts.slope()).to(x.dtype)
    gradient = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = up.shape[-1]
    gradient[..., :half] = grad * parts.slope() * up
    gradient[..., half:] = grad * parts.value
    if activation == "clamped_swiglu":
        gradient[..., half:].masked_fill_(x[..., half:].abs() > _LIMIT, 0.0)
    return gradient


def _probs_gradient(dy: Tensor, x: Tensor, activation: str) -> Tensor:
    return _value(x, activation).mul_(dy).sum(-1)


def _activate_fake(x: Tensor, probs: Tensor | None, activation: str) -> Tensor:
    columns = x.shape[-1] // 2 if activation in GATED else x.shape[-1]
    return x.new_empty((*x.shape[:-1], columns))


_operator = Operators("octavo_torch").define

activate = _operator("activate(Tensor x, Tensor? probs, str activation) -> Tensor", _activate, _activate_fake)
"""fl(fl(act(gate) up) probs), or without gates fl(act(x) probs), rounded to x's dtype: [..., F] of [..., C]. In
clamped_swiglu fl(u + 1), u being up clamped to +-7, is in up's place, and the gate is at most 7: what is past its limit
has the gradient 0.

probs   fp32 [...], one per row
"""

activate_gradient = _operator(
    "activate_gradient(Tensor dy, Tensor x, Tensor? probs, str activation) -> Tensor",
    _activate_gradient,
    lambda dy, x, probs, activation: x.new_empty(x.shape),
)
"""x's gradient, rounded to x's dtype: fl(fl(dy' act'(gate)) up), then fl(dy' act(gate)), with dy' = fl(dy probs)."""

probs_gradient = _operator(
    "probs_gradient(Tensor dy, Tensor x, str activation) -> Tensor",
    _probs_gradient,
    lambda dy, x, activation: x.new_empty(x.shape[:-1], dtype=torch.float32),
)
"""probs' gradient [...], fp32: the sum over a row of dy and the activation's unrounded result."""
