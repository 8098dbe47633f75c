"""Delayed scaling's amaxes under `jax.checkpoint`.

The backward pass returns the amaxes that the forward pass recorded, and an amax has no checkpoint name. Computed
again, it would quantize its operand again, although a policy saved all planes, or at least read it once more. So it
passes through an identity whose result `jax.checkpoint` keeps under every policy: 4 bytes a group and operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array
from jax.extend.core import Primitive, Var
from jax.interpreters import batching, mlir, partial_eval


def kept_amax(amax: Array) -> Array:
    """`amax`, float32 [G], never computed again."""
    kept: Array = _kept_p.bind(amax)  # type: ignore[no-untyped-call]
    return kept


def _remat(
    _: Any, unknown: Sequence[bool], instantiated: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Var]]:
    """What the forward pass runs, what the recompute runs, and what of its operands that must be given."""
    if not any(unknown):
        return equation, None, [False], [False], []
    given = [v for v, there in zip(equation.invars, instantiated, strict=True) if isinstance(v, Var) and not there]
    return None, equation, [True], [True], given


_kept_p = Primitive("octavo_kept_amax")
_kept_p.def_impl(lambda amax: amax)  # type: ignore[no-untyped-call]
_kept_p.def_abstract_eval(lambda amax: amax)  # type: ignore[no-untyped-call]
mlir.register_lowering(_kept_p, lambda _, amax: [amax])
batching.primitive_batchers[_kept_p] = lambda operands, axes: (operands[0], axes[0])
partial_eval.partial_eval_jaxpr_custom_rules[_kept_p] = _remat
