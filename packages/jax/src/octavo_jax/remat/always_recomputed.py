"""Codes from their bits, which `jax.checkpoint` computes again under every policy.

A policy that saves everything but some names would save the codes, too, as floats, and change some of them. Of this
operation it can save the bits alone; the bit cast that runs again costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive, Var
from jax.interpreters import batching, mlir, partial_eval
from jax.typing import DTypeLike

from octavo_jax.remat.partial_eval_rules import operands_to_compute


def from_bits(bits: Array, dtype: DTypeLike) -> Array:
    """The array of `dtype` that has these `bits`, of a dtype as wide; no backward pass keeps it."""
    result: Array = _from_bits_p.bind(bits, dtype=jnp.dtype(dtype))  # type: ignore[no-untyped-call]
    return result


def _cast(bits: Array, *, dtype: DTypeLike) -> Array:
    return lax.bitcast_convert_type(bits, dtype)


def _partial_eval_rule(
    _: Any, unknown: Sequence[bool], instantiated: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Var]]:
    """What the forward pass runs and what the recompute runs; whether the result is unknown to the first, and known to
    the second; and the operands that the recompute has to compute before."""
    inputs = operands_to_compute(equation, instantiated)
    return None if any(unknown) else equation, equation, [any(unknown)], [True], inputs


_from_bits_p = Primitive("octavo_from_bits")
_from_bits_p.def_impl(_cast)  # type: ignore[no-untyped-call]
_from_bits_p.def_abstract_eval(lambda bits, *, dtype: bits.update(dtype=dtype))  # type: ignore[no-untyped-call]
mlir.register_lowering(_from_bits_p, mlir.lower_fun(_cast, multiple_results=False))
batching.primitive_batchers[_from_bits_p] = lambda bits, axes, *, dtype: (from_bits(bits[0], dtype), axes[0])
partial_eval.partial_eval_jaxpr_custom_rules[_from_bits_p] = _partial_eval_rule
