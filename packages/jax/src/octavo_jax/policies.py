"""Policies for `jax.checkpoint` that save quantized arrays, so that the backward pass does not quantize again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME, Direction
from octavo_jax.remat.checkpoint_names import DIRECTIONS, NAMED_OPERANDS, plane_name

Policy = Callable[..., Any]


def save_quantized(*names: str, base: Policy | None = None) -> Policy:
    """A policy that saves every array with one of `names`, and leaves all others to `base`.

    names   checkpoint names of quantizers and of other arrays; none: "quantization", the default of every quantizer.
            Add the `output_checkpoint_name` of a layer to save its y, too, so that its GEMM does not run again. To
            save only some operands or planes, give the names of those: `save_quantized(*plane_names(...))`
    base    another policy, which may also move arrays to the host; None: nothing else is saved

    A saved operand costs one byte per element and plane (half of bf16), and the backward pass then quantizes neither
    x nor the kernel again. Raises ValueError for a name that is not text.
    """
    for name in names:
        if not isinstance(name, str):
            raise ValueError(
                f"names holds {name!r}, which is not text, so that no array has this name; give several names one by "
                "one, as in save_quantized(*plane_names(...)), and another policy as base="
            )
    saved: Policy = jax.checkpoint_policies.save_only_these_names(*(names or (DEFAULT_CHECKPOINT_NAME,)))
    if base is None:
        return saved

    # JAX's save_from_both_policies refuses policies that move arrays
    def both(primitive: Any, *avals: Any, **params: Any) -> Any:
        return saved(primitive, *avals, **params) or base(primitive, *avals, **params)

    return both


def plane_names(
    operands: str | Sequence[str] = tuple(NAMED_OPERANDS.values()),
    directions: Direction | Sequence[Direction] = DIRECTIONS,
    *,
    name: str = DEFAULT_CHECKPOINT_NAME,
) -> tuple[str, ...]:
    """The checkpoint names of some planes of some operands, for `save_quantized`.

    operands     "x", "kernel", or both
    directions   "rowwise" planes are read by fprop, "columnwise" ones by dgrad (of the kernel) and wgrad (of x): a
                 policy that saves the columnwise planes and y keeps all that the backward pass reads
    name         the quantizers' checkpoint name
    """
    operands = (operands,) if isinstance(operands, str) else operands
    directions = (directions,) if isinstance(directions, str) else directions
    return tuple(plane_name(operand, direction, name) for operand in operands for direction in directions)
