"""What quantizers make beside planes, under `jax.checkpoint`: delayed scaling's amaxes, a normalization's statistics.

The backward pass reads them, and they have no checkpoint names. Computed again, they would quantize their operand
again, although a policy saved all planes, or at least read it once more. So they pass through an identity whose result
`jax.checkpoint` keeps under every policy: 4 bytes a group and operand, or a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array
from jax.extend.core import Primitive, Var
from jax.interpreters import batching, mlir, partial_eval


def never_recomputed(x: Array) -> Array:
    """`x`, float32 [G] or [M], which no backward pass computes again."""
    kept: Array = _kept_p.bind(x)  # type: ignore[no-untyped-call]
    return kept


def _remat(
    _: Any, unknown: Sequence[bool], instantiated: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Var]]:
    """What the forward pass runs, what the recompute runs, and what of its operands that must be given."""
    if not any(unknown):
        return equation, None, [False], [False], []
    given = [v for v, there in zip(equation.invars, instantiated, strict=True) if isinstance(v, Var) and not there]
    return None, equation, [True], [True], given


_kept_p = Primitive("octavo_never_recomputed")
_kept_p.def_impl(lambda x: x)  # type: ignore[no-untyped-call]
_kept_p.def_abstract_eval(lambda x: x)  # type: ignore[no-untyped-call]
mlir.register_lowering(_kept_p, lambda _, x: [x])
batching.primitive_batchers[_kept_p] = lambda operands, axes: (operands[0], axes[0])
partial_eval.partial_eval_jaxpr_custom_rules[_kept_p] = _remat
