"""Policies for `jax.checkpoint` that keep quantized arrays instead of quantizing twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME, Direction
from octavo_jax.remat.checkpoint_names import DIRECTIONS, NAMED_OPERANDS, plane_name

Policy = Callable[..., Any]


def save_quantized(*names: str, base: Policy | None = None) -> Policy:
    """Save what quantizers name, whatever else carries one of `names`, and whatever `base` saves.

    names   checkpoint names of quantizers and of other arrays; none: "quantization", every quantizer's default.
            Add the `output_checkpoint_name` of a layer to keep its y and so not run its GEMM again either; give
            `plane_names(...)` to keep some operands or planes alone
    base    another policy; None: nothing else is saved

    A saved operand costs one byte per element and plane (half of bf16), and the backward pass then runs no quantizer
    of x and of the kernel.
    """
    saved: Policy = jax.checkpoint_policies.save_only_these_names(*(names or (DEFAULT_CHECKPOINT_NAME,)))
    if base is None:
        return saved
    both: Policy = jax.checkpoint_policies.save_from_both_policies(base, saved)
    return both


def plane_names(
    operands: Sequence[str] = tuple(NAMED_OPERANDS.values()),
    directions: Sequence[Direction] = DIRECTIONS,
    *,
    name: str = DEFAULT_CHECKPOINT_NAME,
) -> tuple[str, ...]:
    """The checkpoint names of these planes of these operands ("x", "kernel"), for `save_quantized`.

    directions   "rowwise" planes are read by fprop, "columnwise" ones by dgrad (of the kernel) and wgrad (of x): a
                 policy that saves the columnwise planes and y keeps all that the backward pass reads
    name         the quantizers' checkpoint name
    """
    return tuple(plane_name(operand, direction, name) for operand in operands for direction in directions)
