"""Rows of a router's choices that are never written: quantizers and GEMMs read the tokens instead."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jax import Array

from octavo.quantizer import Operand
from octavo.recipe_base import READERS, Gemm
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.arrays.sizes import end_of
from octavo_jax.dispatch.layer import Layer
from octavo_jax.linear.operands import Context, QuantizedOperand, has_local_rows, recorded_operand
from octavo_jax.linear.two_forms import name_operand
from octavo_jax.moe.permutation import rows_of_tokens
from octavo_jax.quantizers.derivatives import undifferentiated
from octavo_jax.scaling.delayed_state import ScalingHistory
from octavo_jax.sharding.quantizers import quantize_local_tokens
from octavo_registry.contract.moves import TokenRows

Source = Literal["tokens", "codes of tokens", "rows"]
"""What a GEMM reads of an operand: it gathers rows from the tokens, or from their codes, or reads the rows."""


class Tokens(NamedTuple):
    """x [T, C], and the rows [R, C] that its choices make: `order` [R] and `position` [T, k] of a Routing."""

    x: Array
    order: Array
    position: Array

    def rows(self) -> Array:
        """The rows, written out."""
        return rows_of_tokens(*self)

    def gathered(self, operand: Array | GroupedTensor, context: Context) -> TokenRows[Array]:
        """Rows of `operand`, which is x or its codes, for a GEMM that gathers them."""
        return TokenRows(operand, self.order, self.position, self.position < end_of(context.group_sizes))


def quantizes_tokens(layer: Layer, operand: Operand, gemms: tuple[Gemm, ...]) -> bool:
    """Whether the layer quantizes the operand from tokens, and none of these GEMMs reads its rows unquantized.

    False on a mesh, unless each device has whole rows of its own, as inside the caller's shard_map.
    """
    plan = layer.quantizer(operand)
    if plan is None or plan.bound.of_tokens is None or not has_local_rows(layer, operand):
        return False
    return all(layer.plan.recipe.quantizes(gemm) for gemm in READERS[operand] if gemm in gemms)


def gathers(layer: Layer, operand: Operand, *gemms: Gemm) -> bool:
    """Whether all these GEMMs gather the operand's rows, in high precision, from the tokens."""
    return has_local_rows(layer, operand) and all(layer.plan.reads_tokens(gemm, operand) for gemm in gemms)


def gathers_codes(layer: Layer, operand: Operand, gemm: Gemm) -> bool:
    """Whether this GEMM gathers the codes of the operand's rows from tokens that are each quantized once."""
    return has_local_rows(layer, operand) and layer.plan.reads_codes_of_tokens(gemm, operand)


def dy_sources(layer: Layer) -> dict[Gemm, Source]:
    """What dgrad and wgrad read of dy.

    Rows that are read as codes are not written if they are quantized from the tokens (`quantizes_tokens`). Otherwise
    they are, and a GEMM that would gather dy unquantized reads them, too.
    """
    sources: dict[Gemm, Source] = {}
    for gemm in READERS["dy"]:
        from_codes = gemm == "dgrad" and gathers_codes(layer, "dy", gemm)
        sources[gemm] = "tokens" if gathers(layer, "dy", gemm) else "codes of tokens" if from_codes else "rows"
    read_rows = tuple(gemm for gemm, source in sources.items() if source == "rows")
    if read_rows and not quantizes_tokens(layer, "dy", read_rows):
        return {gemm: "rows" if source == "tokens" else source for gemm, source in sources.items()}
    return sources


def gathered_rows(
    layer: Layer, operand: Operand, gemm: Gemm, tokens: Tokens, context: Context
) -> TokenRows[Array] | None:
    """The tokens, or their codes, from which this GEMM gathers its rows; None if it reads the rows themselves."""
    if gathers(layer, operand, gemm):
        return tokens.gathered(tokens.x, context)
    return gathered_codes(layer, operand, gemm, tokens, context)


def gathered_codes(
    layer: Layer, operand: Operand, gemm: Gemm, tokens: Tokens, context: Context
) -> TokenRows[Array] | None:
    """The codes of tokens from which this GEMM gathers its rows; None if it does not gather codes."""
    if not gathers_codes(layer, operand, gemm) or tokens.x.shape[0] == 0:  # quantizers take no matrix without rows
        return None
    codes = layer.quantizer_of_tokens(operand).run(undifferentiated(tokens.x)[None], operand=operand)
    return tokens.gathered(name_operand(layer, codes, operand), context)


def quantize_tokens(
    layer: Layer, tokens: Tokens, operand: Operand, context: Context, history: ScalingHistory | None
) -> QuantizedOperand:
    """What `octavo_jax.linear.operands.quantize_operand` returns for the tokens' rows, bit for bit."""
    plan = layer.quantizer(operand)
    assert plan is not None  # else `quantizes_tokens` is False
    of_tokens = layer.in_two_forms(plan).of_tokens
    assert of_tokens is not None
    arguments = context.quantizer_arguments(plan, operand, history)
    routed = tokens.position < end_of(context.group_sizes)
    x, choices = undifferentiated(tokens.x), (tokens.order, tokens.position, routed)
    if layer.placement is None:
        q, amax = of_tokens(x, context.group_sizes, *choices, amax=history is not None, **arguments.keywords())
    else:
        q, amax = quantize_local_tokens(layer.placement, plan, (x, *choices), context.group_sizes, arguments)
    return recorded_operand(layer, q, operand, history, amax)
