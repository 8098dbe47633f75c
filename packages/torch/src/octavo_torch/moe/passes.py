"""The forward and the backward of a MoE layer: composed of its plan's functions, or written down and run again.

A pass of few rows takes a GPU less time than Python takes to make its twenty-odd launches. What these are depends on
the plan, on shapes and on options; so the second call of a kind is written down (octavo_torch.recording), and later
ones make its launches on their own arrays, in a native call or a few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from octavo_torch.compiler.tracing import is_plain
from octavo_torch.mlp.gradients import Needs, Part, freeing, gradients
from octavo_torch.moe.call import MoeCall, MoeOperands
from octavo_torch.moe.forward import Arriving, forward
from octavo_torch.moe.kept import Kept
from octavo_torch.moe.kept_operands import KeptOperands, free_kept
from octavo_torch.moe.saved import MoeContext, kept_by, scales_to_keep
from octavo_torch.recording.calls import Given, RecordedCalls, readable_in_place, repeatable
from octavo_torch.recording.tape import Tape

_INT64, _FLOAT32 = torch.int64, torch.float32

Scales = Sequence[Tensor | None]
"""See `scales_to_keep`."""

Forward = tuple[Tensor, Sequence[Tensor | None], Kept]
"""y [T, N], what autograd saves, and what else backward reads."""


class MoeGradients(NamedTuple):
    """The gradients of a MoE layer's operands; None for those that are not needed."""

    x: Tensor | None
    w1: Tensor | None
    w2: Tensor | None
    weights: Tensor | None
    bias1: Tensor | None
    bias2: Tensor | None


def run_forward(
    call: MoeCall, choices: Tensor, operands: MoeOperands, arriving: Arriving
) -> tuple[Forward, RecordedCalls[Kept] | None]:
    """A forward; and the passes of such calls, None where the call's are composed."""
    scales = scales_to_keep(call)
    cast = _cast(choices, operands) if _may_be_recorded(call, choices) else None
    given = None if cast is None else _given_to_forward(call, *cast, scales)
    recorded = None if given is None else call.moe.recorded_calls.of(call.kind(given))
    if recorded is None or given is None or cast is None:
        return _composed_forward(call, choices, operands, arriving, scales), None
    y: Tensor | None
    tensors: Sequence[Tensor | None]
    if recorded.forward is None:
        y, tensors, kept = _write_forward(recorded, call, given, *cast, scales)
    else:
        y, *tensors = recorded.forward.run(given, operands.x)
        call.mark_states()
        kept = recorded.kept
    assert y is not None  # every forward returns it
    originals = {id(cast[0]): choices, id(cast[1].weights): operands.weights}
    tensors = [originals.get(id(tensor), tensor) for tensor in tensors]
    return (y, tensors, kept), None if recorded.composed else recorded


def run_backward(ctx: MoeContext, tensors: tuple[Tensor, ...], dy: Tensor, needs: Needs) -> MoeGradients:
    """The gradients. `tensors` are those that forward has saved. ValueError for a state that has changed in shape or
    dtype since."""
    ctx.call.check_states(dy)
    call, done_with, recorded = ctx.call, freeing(ctx, dy, partial(free_kept, ctx, tensors)), ctx.recorded
    given = None if recorded is None else _given_to_backward(ctx, tensors, dy)
    if recorded is None or given is None:
        return _composed_backward(ctx, tensors, dy, needs, done_with)
    assert call.moe.recorder is not None  # forward was written down
    own, *kept = given[: len(given) - len(call.state_tensors())]
    compose = partial(_composed_backward, ctx, kept, own, needs)  # type: ignore[arg-type]  # as ctx.saved_tensors
    found, run_again = recorded.run_backward(needs, given, call.moe.recorder, compose, done_with)
    if run_again:
        call.mark_states()
    return MoeGradients(*found)


def _may_be_recorded(call: MoeCall, choices: Tensor) -> bool:
    moe = call.moe
    return (
        moe.recorder is not None
        and is_plain(choices)
        and choices.numel() > 0
        and call.token_exchange is None
        and call.room is None
        and call.probes is None
        and call.moves.backends == moe.backends
    )


def _cast(choices: Tensor, operands: MoeOperands) -> tuple[Tensor, MoeOperands]:
    """The choices and their weights in the dtypes in which launches read them."""
    weights = operands.weights
    if weights.dtype is not _FLOAT32:
        operands = operands._replace(weights=weights.to(_FLOAT32))
    return choices.to(_INT64), operands


def _given_to_forward(call: MoeCall, choices: Tensor, operands: MoeOperands, scales: Scales) -> Given | None:
    """What the launches of a forward read or change; None where they would not read them as they are."""
    return readable_in_place([choices, *operands, *scales, *call.codes_given()], call.state_tensors())


def _given_to_backward(ctx: MoeContext, tensors: Sequence[Tensor | None], dy: Tensor) -> Given | None:
    """The same of a backward: dy, what forward has saved, and delayed scaling's states."""
    call = ctx.call
    if call.fc1.target is not None or call.fc2.target is not None:
        return None  # what becomes of a weight's gradient is not a launch alone
    given: Given = [dy.contiguous(), *tensors]
    for name, dtype in (("choices", _INT64), ("weights", _FLOAT32)):
        saved = ctx.kept.saved.get(name)
        value = None if saved is None else tensors[saved.start]
        if saved is not None and value is not None:
            given[1 + saved.start] = value.to(dtype)
    return readable_in_place(given, call.state_tensors())


def _write_forward(
    recorded: RecordedCalls[Kept], call: MoeCall, given: Given, choices: Tensor, operands: MoeOperands, scales: Scales
) -> Forward:
    assert call.moe.recorder is not None  # of a call that may be recorded
    with Tape(call.moe.recorder, operands.x, given) as tape:
        y, tensors, kept = _composed_forward(call, choices, operands, lambda: operands.x, scales)
    foreign = kept.reader is not None and kept.reader.backend not in call.moe.backends
    recorded.set_forward(None if foreign else repeatable(tape, given, [y, *tensors]), kept)
    return y, tensors, kept


# ---- composed


def _composed_forward(
    call: MoeCall, choices: Tensor, operands: MoeOperands, arriving: Arriving, scales: Scales
) -> Forward:
    result = forward(call, choices, operands, arriving)
    return result.y, *kept_by(call, choices, operands, result, scales)


def _composed_backward(
    ctx: MoeContext, tensors: Sequence[Tensor], dy: Tensor, needs: Needs, done_with: Callable[[Part], None]
) -> MoeGradients:
    """The gradients. `tensors` are those that forward has saved, and `done_with` is told of each when it was read."""
    moves, token_exchange = ctx.call.moves, ctx.call.token_exchange
    operands = KeptOperands(ctx, tensors, dy, done_with)
    grads = gradients(ctx.call, needs, operands)
    _, position, routed = operands.places
    dprobs = _sum(grads.probs, grads.bias2_scales)
    if dprobs is not None:
        by_choice = moves.weights.combine_rows(dprobs[:, None], position.view(-1, 1), routed.view(-1, 1), None)
        dprobs = by_choice.view(position.shape)
        if token_exchange is not None:
            dprobs = token_exchange.combine_weights(dprobs)
    return MoeGradients(grads.x, grads.w1, grads.w2, dprobs, grads.bias1, grads.bias2)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return first if second is None else second if first is None else first + second
