"""A router's logits: the product of tokens and the router in fp32, and its gradients.

Tensor cores have no product of fp32, and without them it takes ten times as long as one of bf16. But bf16 times bf16 is
exact in fp32, and an fp32 value is the sum of three of bf16, each with the next 8 of its 24 bits. So on CUDA, where the
tokens are bf16, each product is one of bf16 that tensor cores sum in fp32, over a few matrices side by side.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from octavo_jax.arithmetic.widening import in_fp32
from octavo_jax.dispatch.device import device_of
from octavo_jax.quantizers.derivatives import call_reverse_mode_only

_FUNCTION = "moe_mlp"
_PARTS = 3  # of 8 bits each, of the 24 of fp32


def router_logits(tokens: Array, router: Array) -> Array:
    """float32 [T, E] of tokens [T, K] and a router [K, E], in their common dtype.

    JAX's default for float32 on a GPU is TF32, which would round the router's weights, and the logits' gradients, to 11
    bits in silence. Whoever sets `jax.default_matmul_precision` has asked for what it says.
    """
    asked = jax.config.jax_default_matmul_precision is not None  # type: ignore[attr-defined]  # made at run time
    if not asked and _has_parts(tokens, router) and device_of(tokens).kind == "cuda":
        return logits_by_parts(tokens, router)
    wide = jnp.float32 in (tokens.dtype, router.dtype) or tokens.dtype != router.dtype
    precision = lax.Precision.HIGHEST if wide and not asked else None
    if wide:
        tokens, router = in_fp32(tokens), in_fp32(router)
    return jnp.matmul(tokens, router, precision=precision, preferred_element_type=jnp.float32)


def _has_parts(tokens: Array, router: Array) -> bool:
    return tokens.dtype == jnp.bfloat16 and router.dtype in (jnp.bfloat16, jnp.float32)


def logits_by_parts(tokens: Array, router: Array) -> Array:
    """`router_logits` of tokens in bf16; its gradients have the dtypes of tokens and router."""
    return call_reverse_mode_only(_FUNCTION, _logits, tokens, router)


@jax.custom_vjp
def _logits(tokens: Array, router: Array) -> Array:
    return _added_up(_sums(tokens, _parts_of(router), 1, 0), router.shape[1])


def _forward(tokens: Array, router: Array) -> tuple[Array, tuple[Array, Array]]:
    return logits_by_parts(tokens, router), (tokens, router)


def _backward(kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    return call_reverse_mode_only(_FUNCTION, _gradients, *kept, dy)


_logits.defvjp(_forward, _backward)


@jax.custom_vjp
def _gradients(tokens: Array, router: Array, dy: Array) -> tuple[Array, Array]:
    left, right = _parts_of(dy), _parts_of(router)
    # of two matrices in three parts each the pairs below 2^-24 of the product are left out
    pairs = [(one, other) for i, one in enumerate(left) for j, other in enumerate(right) if i + j < _PARTS]
    of_dy, router_fields = (jnp.concatenate(side, 1) for side in zip(*pairs, strict=True))
    dx = _sums(of_dy, [router_fields], 1, 1)
    drouter = _added_up(_sums(tokens, left, 0, 0), router.shape[1])
    return dx.astype(tokens.dtype), drouter.astype(router.dtype)


def _in_fp32(tokens: Array, router: Array, dy: Array) -> tuple[Array, Array]:
    """`_gradients` by JAX's own products."""

    def product(tokens: Array, router: Array) -> Array:
        return jnp.matmul(*(side.astype(jnp.float32) for side in (tokens, router)), precision=lax.Precision.HIGHEST)

    dx, drouter = jax.vjp(product, tokens, router)[1](dy)
    return dx, drouter


# differentiated through the parts, each cotangent would be rounded to bf16
_gradients.defvjp(lambda *sides: (_gradients(*sides), sides), lambda sides, cts: jax.vjp(_in_fp32, *sides)[1](cts))


def _parts_of(values: Array) -> list[Array]:
    """bf16 arrays whose sum is `values`, the largest first; what is infinite or NaN is in the first alone.

    Rounded by `reduce_precision`, because XLA may leave a conversion to bf16 and back out.
    """
    if values.dtype == jnp.bfloat16:
        return [values]
    parts, rest = [], values
    for _ in range(_PARTS):
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = jnp.where(jnp.isfinite(part), rest - part, 0)
    return parts


def _sums(left: Array, right: list[Array], left_axis: int, right_axis: int) -> Any:
    """float32 products of bf16, `right` side by side, summed over an axis of each."""
    beside = right[0] if len(right) == 1 else jnp.concatenate(right, 1)
    axes = (((left_axis,), (right_axis,)), ((), ()))
    return lax.dot_general(left, beside, axes, preferred_element_type=jnp.float32)


def _added_up(sums: Array, experts: int) -> Array:
    """[.., E] of what stands side by side in [.., parts * E]."""
    if sums.shape[1] == experts:
        return sums
    return jnp.sum(sums.reshape(len(sums), _PARTS, experts), 1)
