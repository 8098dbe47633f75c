"""Other results of quantizers under `jax.checkpoint`: the amaxes of delayed scaling, the statistics of a normalization.

The backward pass reads them, and they have no checkpoint names. Computed again, they would quantize their operand
again, although a policy saved all planes, or at least read it once more. So they pass through an identity whose result
`jax.checkpoint` keeps under every policy: 4 bytes per group and operand, or per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array
from jax.extend.core import Primitive, Var
from jax.interpreters import batching, mlir, partial_eval

from octavo_jax.remat.partial_eval_rules import operands_to_compute


def never_recomputed(x: Array) -> Array:
    """`x`, float32 [G] or [M], which no backward pass computes again."""
    result: Array = _never_recomputed_p.bind(x)  # type: ignore[no-untyped-call]
    return result


def _partial_eval_rule(
    _: Any, unknown: Sequence[bool], instantiated: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Var]]:
    """What the forward pass runs and what the recompute runs; whether the result is unknown to the first, and known to
    the second; and the operands that the recompute has to compute before."""
    if not any(unknown):
        return equation, None, [False], [False], []
    inputs = operands_to_compute(equation, instantiated)
    return None, equation, [True], [True], inputs


_never_recomputed_p = Primitive("octavo_never_recomputed")
_never_recomputed_p.def_impl(lambda x: x)  # type: ignore[no-untyped-call]
_never_recomputed_p.def_abstract_eval(lambda x: x)  # type: ignore[no-untyped-call]
mlir.register_lowering(_never_recomputed_p, lambda _, x: [x])
batching.primitive_batchers[_never_recomputed_p] = lambda operands, axes: (operands[0], axes[0])
partial_eval.partial_eval_jaxpr_custom_rules[_never_recomputed_p] = _partial_eval_rule
