"""What the rules of this package's primitives for `jax.checkpoint` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Var


def operands_to_compute(equation: Any, is_present: Sequence[bool]) -> list[Var]:
    """The operands that a recompute has to compute before it runs this equation.

    is_present   of each operand, whether the recompute has it already
    """
    operands = zip(equation.invars, is_present, strict=True)
    return [v for v, present in operands if isinstance(v, Var) and not present]
