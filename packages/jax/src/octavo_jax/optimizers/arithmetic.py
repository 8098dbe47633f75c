"""AdamW's operations, each rounded to fp32 once and none contracted: the bits of octavo_numerics' `adamw_step`.

XLA contracts a product and a sum, and may reorder quotients. So an integer operation stands behind each product,
quotient and root: exclusive or with a word that is zero, which the compiler cannot know.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from octavo_jax.arithmetic import bits as fp32

_STEP_BITS = 24
_ONE = np.float32(1)


class Rule(NamedTuple):
    """Hyperparameters of one parameter in one step; lr is an fp32 scalar."""

    lr: Array
    b1: float
    b2: float
    eps: float
    weight_decay: float


class Corrections(NamedTuple):
    """Of one step, for all parameters: 1 - b1^t, 1 / sqrt(1 - b2^t), and the zero of `opaque`."""

    first: Array
    root_scale: Array
    zero: Array


def opaque(value: Array, zero: Array) -> Array:
    """`value`, bit for bit, for a uint32 `zero`."""
    return fp32.as_float(fp32.as_bits(value) ^ zero)


def corrections(step: Array, b1: float, b2: float) -> Corrections:
    """Those of step number `step`, int32 and at least 1."""
    zero = (step >> 31).astype(jnp.uint32)
    root = opaque(jnp.sqrt(_correction(b2, step, zero)), zero)
    return Corrections(_correction(b1, step, zero), opaque(_ONE / root, zero), zero)


def _correction(beta: float, step: Array, zero: Array) -> Array:
    """octavo_numerics' `bias_correction`."""
    count = jnp.minimum(step, (1 << _STEP_BITS) - 1)
    q, power = jnp.zeros((), jnp.float32), beta
    for bit in range(_STEP_BITS):
        grown = q + opaque((_ONE - q) * np.float32(1 - power), zero)
        q = opaque(jnp.where((count >> bit) & 1 == 1, grown, q), zero)
        power *= power
    return q


def advance(
    master: Array, grad: Array, first: Array, second: Array, rule: Rule, step: Corrections
) -> tuple[Array, Array, Array]:
    """The fp32 master and moments after one more gradient, all fp32."""
    zero = step.zero

    def product(a: Array, b: Array | np.float32) -> Array:
        return opaque(a * b, zero)

    first = product(first, np.float32(rule.b1)) + product(grad, np.float32(1 - rule.b1))
    square = product(grad, grad)
    second = product(second, np.float32(rule.b2)) + product(square, np.float32(1 - rule.b2))
    denominator = product(opaque(jnp.sqrt(second), zero), step.root_scale) + np.float32(rule.eps)
    update = opaque(first / denominator, zero)
    decay = _ONE - product(rule.lr, np.float32(rule.weight_decay))
    step_size = opaque(rule.lr / step.first, zero)
    return product(master, decay) - product(update, step_size), first, second
