"""AdamW's operations, each rounded to fp32 once and none contracted: the bits of octavo_numerics' `adamw_step`.

XLA contracts a product and a sum. So an integer operation stands behind each product: exclusive or with words that are
zero, which the compiler cannot know. On a GPU its quotients and roots are off by an ulp or two, and are mended here.
"""

from __future__ import annotations

import functools
import operator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from octavo_jax.arithmetic import bits as fp32

_STEP_BITS = 24
_ONE = np.float32(1)


class Rule(NamedTuple):
    """Hyperparameters of one parameter that stay the same in all steps."""

    b1: float
    b2: float
    eps: float
    weight_decay: float


class Corrections(NamedTuple):
    """Of one step, for all parameters: 1 - b1^t and 1 / sqrt(1 - b2^t)."""

    first: Array
    root_scale: Array


def hidden_zero(*values: Array) -> Array:
    """uint32 zeros, one for each element of fp32 `values`, of which a compiler knows that at most where it knows all
    values: a square leaves 0 or 1 when it is divided by 3."""
    word = functools.reduce(operator.add, map(fp32.as_bits, values)) & 0xFFFF
    return lax.rem(word * word, np.uint32(3)) >> 1


def opaque(value: Array, zero: Array) -> Array:
    """`value`, bit for bit, for a uint32 `zero`."""
    return fp32.as_float(fp32.as_bits(value) ^ zero)


def quotient(a: Array, b: Array) -> Array:
    """fl(a / b) on every device."""
    top, bottom = (fp32.as_bits(value) for value in (a, b))
    sign = (top ^ bottom) & fp32.SIGN
    top, bottom = top & fp32.MAGNITUDE, bottom & fp32.MAGNITUDE
    ordinary = fp32.is_finite(top) & (top > 0) & fp32.is_finite(bottom) & (bottom > 0)
    return jnp.where(ordinary, fp32.as_float(fp32.divide(top, bottom) | sign), a / b)


def root(a: Array) -> Array:
    """fl(sqrt(a)) on every device."""
    bits = fp32.as_bits(a)
    return jnp.where(fp32.is_finite(bits), fp32.as_float(fp32.square_root(bits)), jnp.sqrt(a))


@partial(jax.jit, static_argnames=("b1", "b2"))
def corrections(step: Array, b1: float, b2: float) -> Corrections:
    """Those of step number `step`, int32 and at least 1."""
    zero = (step >> 31).astype(jnp.uint32)
    scale = quotient(jnp.ones((), jnp.float32), root(_correction(b2, step, zero)))
    return Corrections(_correction(b1, step, zero), scale)


def _correction(beta: float, step: Array, zero: Array) -> Array:
    """octavo_numerics' `bias_correction`."""
    count = jnp.minimum(step, (1 << _STEP_BITS) - 1)
    q, power = jnp.zeros((), jnp.float32), beta
    for bit in range(_STEP_BITS):
        grown = q + opaque((_ONE - q) * np.float32(1 - power), zero)
        q = opaque(jnp.where((count >> bit) & 1 == 1, grown, q), zero)
        power *= power
    return q


# Parameters of one shape share one trace, and a step outside of jit is two programs and not a hundred.
@partial(jax.jit, static_argnames="rule")
def advance(
    master: Array, grad: Array, first: Array, second: Array, rate: Array, rule: Rule, step: Corrections
) -> tuple[Array, Array, Array]:
    """The fp32 master and moments after one more gradient, all fp32; `rate` is the learning rate, an fp32 scalar."""
    # Not of the step alone: that of a state which is made in the same program, or which it closes over, is a constant.
    zero = hidden_zero(master, grad, first, second, rate)

    def product(a: Array, b: Array | np.float32) -> Array:
        return opaque(a * b, zero)

    first = product(first, np.float32(rule.b1)) + product(grad, np.float32(1 - rule.b1))
    square = product(grad, grad)
    second = product(second, np.float32(rule.b2)) + product(square, np.float32(1 - rule.b2))
    denominator = product(root(second), step.root_scale) + np.float32(rule.eps)
    update = quotient(first, denominator)
    decay = _ONE - opaque(rate * np.float32(rule.weight_decay), hidden_zero(rate))
    step_size = quotient(rate, step.first)
    return product(master, decay) - product(update, step_size), first, second
