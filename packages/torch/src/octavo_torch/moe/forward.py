"""The forward of a MoE layer: tokens to the experts' rows, their MLP, and the rows back to tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from octavo.quantizer import Operand
from octavo_registry.contract.moves import TokenRows
from octavo_registry.contract.quantize import QuantizeTokens
from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_torch.arithmetic import operators
from octavo_torch.arrays.grouped_tensor import GroupedTensor, Matrix, Rows
from octavo_torch.arrays.sizes import group_sizes_of
from octavo_torch.linear.autograd import RowValues, quantize_operand
from octavo_torch.linear.call import Call
from octavo_torch.mlp.concurrent_quantizer import ConcurrentQuantizer
from octavo_torch.mlp.forward import first_layer, forward_seeds, second_layer
from octavo_torch.moe.call import MoeCall, MoeOperands
from octavo_torch.moe.forms import RowCodes, keep_rows
from octavo_torch.moe.rows.derivatives import Places
from octavo_torch.scaling.seeds import DrawnSeed

Arriving = Callable[[], Tensor]
"""Returns the tokens [T, K], once they have come from other ranks. It is called once."""


class MoeForward(NamedTuple):
    """y [T, N], and what backward may need; None for what the call's form does not keep.

    tokens   [T, K] of this rank's experts
    sizes    int64 [G], rows of each expert
    seeds    the seeds with which the operands of fc1 and of fc2 were rounded; None where they round to nearest
    x, a     the operands of the two layers as their GEMMs read them
    h        fc1's result
    w1, w2   the weights as the layers' GEMMs read them
    """

    y: Tensor
    tokens: Tensor
    places: Places
    sizes: Tensor
    seeds: tuple[DrawnSeed, DrawnSeed]
    x: Matrix | None
    h: Tensor | RowCodes | None
    w1: Matrix
    a: Matrix | None
    w2: Matrix


def forward(call: MoeCall, choices: Tensor, operands: MoeOperands, arriving: Arriving) -> MoeForward:
    """y [T, N], and what backward may need. `arriving` is called when the places of its rows are known."""
    _, w1, w2, weights, bias1, bias2 = operands
    keeps_all = call.form == "keep_all"
    places, sizes = call.place(choices)
    probs = weights_as_rows(call, weights, places)
    seeds = forward_seeds(call)
    x = arriving()
    rows = rows_for(call, seeds[0], x, places)
    w2_quantizer = ConcurrentQuantizer.of(call, w2, seeds[1])
    h, rows_read, matrices1 = first_layer(call, seeds[0], rows, w1, bias1, w2_quantizer)
    _record(call.fc1, call.moe.amax_only[0], rows, matrices1)
    kept_x = _kept_x(call, rows, rows_read) if keeps_all else None
    # freed before fc2's operands are allocated
    del rows, rows_read
    call.fc1.x_codes = None
    kept_h = h if call.moe.hidden is None else keep_rows(call.moe.hidden, h, call.sizes, call.backend)
    bias2_scales = None if bias2 is None else probs
    y, a, matrices2 = second_layer(call, seeds[1], h, probs, w2, bias2, bias2_scales, w2_quantizer)
    _record(call.fc2, call.moe.amax_only[1], a, matrices2)
    combined = call.combine(call.moves.results, y, places)()
    return MoeForward(
        combined, x, places, sizes, seeds, kept_x, None if call.form == "recompute" else kept_h, matrices1,
        a if keeps_all else None, matrices2,
    )  # fmt: skip


def arrive(call: MoeCall, choices: Tensor, operands: MoeOperands) -> tuple[Tensor, MoeOperands, Arriving]:
    """The choices and operands that the experts of this rank work on, and a function that waits for their tokens.

    Within one process these are the arguments. Over ranks, the choices are those for this rank's experts, from all
    ranks, and the operands have their weights; w1 and w2 are quantized while the tokens travel.
    """
    if call.token_exchange is None:
        return choices, operands, lambda: operands.x
    underway = call.token_exchange.dispatch(operands.x, operands.weights, choices)
    _quantize_weights(call, operands)
    choices, weights = underway.choices()
    return choices, operands._replace(weights=weights), underway.tokens


def _quantize_weights(call: MoeCall, operands: MoeOperands) -> None:
    seeds = forward_seeds(call)
    for layer_call, weight, seed in zip((call.fc1, call.fc2), operands[1:3], seeds, strict=True):
        quantize = layer_call.layer.quantize_w
        if quantize is not None and layer_call.w_codes is None:
            layer_call.w_made = quantize_operand(layer_call, quantize, "w", weight, seed)


def rows_for(call: MoeCall, seed: DrawnSeed, x: Tensor, places: Places) -> RowValues:
    """What `first_layer` takes as fc1's rows, made of the tokens x.

    If the GEMM gathers its rows: x, or codes of x, together with the places of the rows. If the rows are quantized from
    the tokens: x itself, which nothing reads, because `call.fc1.x_codes` is set. Otherwise the permuted rows.
    """
    read = call.moe.x_in_fprop
    if read == "rows" or call.fc1.probe is not None:
        return call.moves.tokens.permute_rows(x, *places, None)
    if read == "tokens":
        return TokenRows(x, *places)
    if read == "codes of tokens":
        assert call.moe.x_token_quantizer is not None
        return codes_of_tokens(call.moe.x_token_quantizer, "x", x, places)
    call.fc1.x_codes = quantize_tokens(call.fc1, call.fc1.layer.of_tokens["x"], "x", x, places, seed)
    return x


def codes_of_tokens(quantizer: QuantizePlan, operand: Operand, tokens: Tensor, places: Places) -> TokenRows[Tensor]:
    """Codes of the tokens, each quantized once, for a GEMM that gathers them: all rows of one token have the same."""
    return TokenRows(quantizer.run(tokens[None], operand=operand), *places)


def quantize_tokens(
    call: Call,
    of_tokens: QuantizeTokens[Tensor, GroupedTensor],
    operand: Operand,
    tokens: Tensor,
    places: Places,
    seed: DrawnSeed,
) -> GroupedTensor:
    """What `quantize_operand` returns for the rows that the choices make of `tokens`, without writing these rows."""
    state = call.state
    records = state is not None and call.record
    codes, amax = of_tokens(
        tokens, call.sizes, *places, amax=records, seed=seed, operand=operand, group_offset=call.group_offset,
        scale=None if state is None else state.encode_scale(operand),
    )  # fmt: skip
    if records:
        assert state is not None
        assert amax is not None  # asked for
        state.record(operand, amax)
    return codes


def weights_as_rows(call: MoeCall, weights: Tensor, places: Places) -> Tensor:
    """The choices' weights as fp32 [M], one per row; values past the sum of the sizes are never read."""
    order, position, routed = places
    values = weights.float().reshape(-1, 1)
    return call.moves.weights.permute_rows(values, order, position.view(-1, 1), routed.view(-1, 1), None).view(-1)


def _kept_x(call: MoeCall, values: RowValues, read: Rows) -> Matrix | None:
    """The rows of x as fc1's wgrad reads them; None if it gathers them.

    values   the rows in high precision
    read     the rows as forward's product has read them
    """
    rows = read if call.plan.fc1.quantized_wgrad else values
    return None if call.moe.x_in_wgrad == "tokens" or isinstance(rows, TokenRows) else rows


def _record(call: Call, operands: Sequence[Operand], x: Rows, w: Matrix) -> None:
    """Records, in delayed scaling's state, the amax of operands that only backward quantizes."""
    if call.state is None or not call.record:
        return
    pairs: tuple[tuple[Operand, Rows], ...] = (("x", x), ("w", w))
    for name, value in pairs:
        if name in operands and isinstance(value, Tensor):
            sizes = None if name == "w" else group_sizes_of(call.sizes)
            call.state.record(name, operators.group_amax_of(value, sizes))
