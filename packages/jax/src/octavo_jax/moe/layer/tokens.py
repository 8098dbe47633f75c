"""Rows of a router's choices, quantized from the tokens: no program writes or reads the rows themselves."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from octavo.quantizer import Operand
from octavo.recipe_base import READERS, Gemm
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.arrays.sizes import end_of
from octavo_jax.dispatch.layer import Layer
from octavo_jax.linear.operands import Context, named
from octavo_jax.quantizers.derivatives import undifferentiated
from octavo_jax.remat.never_recomputed import never_recomputed
from octavo_jax.scaling.delayed_state import ScalingHistory, record_amax
from octavo_jax.sharding.quantizers import owns_rows, quantize_own_rows
from octavo_registry import QuantizePlan


class Tokens(NamedTuple):
    """x [T, C], and the rows [R, C] that its choices make: `order` [R] and `position` [T, k] of a Routing."""

    x: Array
    order: Array
    position: Array


def reads_tokens(layer: Layer, plan: QuantizePlan | None, operand: Operand, read: tuple[Gemm, ...]) -> bool:
    """Whether `plan` makes the operand's codes from tokens, and of these GEMMs none reads the rows.

    On a mesh the rows have to be a device's own, as inside the caller's shard_map.
    """
    if plan is None or plan.bound.of_tokens is None:
        return False
    if layer.placement is not None and not owns_rows(layer.placement, "i" if operand == "x" else "o"):
        return False
    return all(layer.plan.recipe.quantizes(gemm) for gemm in READERS[operand] if gemm in read)


def quantize_tokens(
    plan: QuantizePlan | None,
    layer: Layer,
    tokens: Tokens,
    operand: Operand,
    context: Context,
    history: ScalingHistory | None,
) -> tuple[GroupedTensor, ScalingHistory | None]:
    """As `octavo_jax.linear.operands.quantize_operand` of the tokens' rows, bit for bit."""
    assert plan is not None  # `reads_tokens` has looked
    of_tokens = plan.bound.of_tokens
    assert of_tokens is not None
    arguments = context.quantizer_arguments(plan, operand, history)
    routed = tokens.position < end_of(context.group_sizes)
    given = undifferentiated(tokens.x), tokens.order, tokens.position, routed
    if layer.placement is None:
        x, *choices = given
        q, amax = of_tokens(x, context.group_sizes, *choices, amax=history is not None, **arguments.keywords())
    else:
        q, amax = quantize_own_rows(layer.placement, plan, given, context.group_sizes, arguments)
    if history is None:
        return named(layer, q, operand), None
    assert amax is not None  # asked for
    return named(layer, q, operand), record_amax(history, never_recomputed(amax))
