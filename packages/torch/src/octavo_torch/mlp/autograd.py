"""The forward and backward of a grouped MLP.

Forward:   x quantized -> fc1 -> h -> activation x probs + quantize -> fc2 -> y
Backward:  dy quantized -> fc2's dgrad and wgrad -> activation's gradient + bias gradient + quantize -> fc1's

Saved for backward, in bytes per element of a bf16 call whose recipe has codes of one byte (scales aside): 1 of x, 2 of
h, 1 of the activation, 1 of each weight. An activation that wgrad reads in high precision is computed again. Unless the
graph is retained, backward frees h and the codes that forward has made, each as soon as nothing else will read it.

The second call of a kind is written down (octavo_torch.recording), and later ones make its launches on their arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from octavo_torch.arrays.grouped_tensor import Matrix
from octavo_torch.arrays.sizes import group_sizes_of
from octavo_torch.autograd.gradients import Context, cast_gradients, dtypes_of, needed_gradients
from octavo_torch.autograd.saved import Saved, SavedByName, free_saved, with_sizes, without_sizes
from octavo_torch.autograd.saved_tensors import save, saved_tensors
from octavo_torch.compiler.refused_derivatives import FirstOrderFunction, check_no_graph
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.linear import contexts
from octavo_torch.linear.autograd import note_left_out
from octavo_torch.mlp.call import MlpCall, Operands
from octavo_torch.mlp.forward import activation_again, forward
from octavo_torch.mlp.gradients import Gradients, Needs, Part, check_not_freed, freeing, gradients
from octavo_torch.recording.calls import Given, RecordedCalls, readable_in_place, repeatable
from octavo_torch.recording.tape import Tape
from octavo_torch.scaling.seeds import DrawnSeed

_is_compiling = torch.compiler.is_compiling

Forward = tuple[Tensor, Sequence[Tensor | None], SavedByName]
"""y [M, N], what autograd saves (sizes, h, probs, bias2, bias2_scales, and operands), and where the operands are among
it: x, w1, a (the activation), w2."""


class MlpContext(Context, Protocol):
    """autograd's ctx of a grouped MLP.

    freed      whether a backward that has not ended has freed what it has read
    recorded   the passes of such calls, if the forward was written down; None: the backward is composed
    """

    call: MlpCall
    freed: bool
    recorded: RecordedCalls[SavedByName] | None
    saved: SavedByName


class GroupedMLPFunction(FirstOrderFunction):
    """grouped_mlp with gradients of x, weights, probs, biases and bias2_scales, each only where it is asked for."""

    @staticmethod
    def forward(
        ctx: MlpContext,
        call: MlpCall,
        out: Tensor | None,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        probs: Tensor | None,
        bias1: Tensor | None,
        bias2: Tensor | None,
        bias2_scales: Tensor | None,
        anchor: Tensor | None,
    ) -> Tensor:
        """y [M, N], written into `out` if it is given. `anchor`: see parameters.anchor_of."""
        dtypes = dtypes_of(x, w1, w2, probs, bias1, bias2, bias2_scales, anchor)
        w1, w2 = call.fc1.values_of(w1), call.fc2.values_of(w2)
        (y, tensors, ctx.saved), ctx.recorded = run_forward(
            call, Operands(x, w1, w2, probs, bias1, bias2, bias2_scales)
        )
        call.release()
        save(ctx, *tensors)
        ctx.call, ctx.freed, ctx.dtypes = call, False, dtypes
        if out is not None:
            ctx.mark_dirty(out)
        return y

    @staticmethod
    def backward(ctx: MlpContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        check_no_graph(dy)
        with torch.no_grad():
            return (None, None, *contexts.run_backward(_backward, ctx, dy))


def run_forward(call: MlpCall, operands: Operands) -> tuple[Forward, RecordedCalls[SavedByName] | None]:
    """A forward, of a call with sizes as they were given; and the passes of such calls, None where it is composed."""
    given = _given_to_forward(call, operands)
    recorded = None if given is None else call.plan.recorded_calls.of(call.kind(given))
    if recorded is None or given is None:
        return _composed_forward(call, operands), None
    if recorded.forward is not None:
        y, *results = recorded.forward.run(given, operands.x)
        call.mark_states()
        assert y is not None  # every forward returns it
        return (y, results, recorded.kept), recorded
    assert call.plan.recorder is not None  # of what is given
    with Tape(call.plan.recorder, operands.x, given) as tape:
        y, tensors, saved = _composed_forward(call, operands)
    recorded.set_forward(repeatable(tape, given, [y, *tensors]), saved)
    return (y, tensors, saved), None if recorded.composed else recorded


def _given_to_forward(call: MlpCall, operands: Operands) -> Given | None:
    """What the launches of a forward read or change; None where they would not read them as they are, or a pass does
    more than launch."""
    sizes = call.sizes
    if (
        call.plan.recorder is None
        or not isinstance(sizes, Tensor)
        or not is_plain(operands.x)
        or not operands.x.numel()
        or sizes.device != operands.x.device
        or call.fc1.x_codes is not None
    ):
        return None
    if any(option is not None for option in (call.out, call.grad_input, call.room, call.probes)):
        return None
    return readable_in_place([*operands, *call.codes_given()], [sizes, *call.state_tensors()])


def _composed_forward(call: MlpCall, operands: Operands) -> Forward:
    x, w1, w2, probs, _, bias2, bias2_scales = operands
    fc1, fc2 = call.plan.fc1, call.plan.fc2
    sizes = call.sizes
    assert isinstance(sizes, Tensor)  # not prepared before
    call.set_sizes(sizes, x.shape[0], x)
    own_x, own_w1, own_w2 = (codes is None for codes in (call.fc1.x_codes, call.fc1.w_codes, call.fc2.w_codes))
    result = forward(call, operands)
    # a checkpoint that runs the forward again expects as many tensors, whether or not the pass was written down then
    tensors = [group_sizes_of(call.sizes), None, None, None, None]
    saved: SavedByName = {}
    if fc2.need_dx or (fc2.need_dw and not fc2.quantized_wgrad):
        tensors[1:3] = [result.h, probs]
    if bias2_scales is not None:
        tensors[3:] = [bias2, bias2_scales]
    if fc1.need_dw:
        saved["x"] = Saved(without_sizes(result.x) if fc1.quantized_wgrad else x, tensors, own_x)
    if fc1.need_dx:
        saved["w1"] = Saved(result.w1 if fc1.quantized_dgrad else w1, tensors, own_w1, fc1.w_planes.dgrad)
    if fc2.need_dw and fc2.quantized_wgrad:
        saved["a"] = Saved(without_sizes(result.a), tensors, own=True)
    if fc2.need_dx:
        saved["w2"] = Saved(result.w2 if fc2.quantized_dgrad else w2, tensors, own_w2, fc2.w_planes.dgrad)
    return result.y, tensors, saved


def _free(ctx: MlpContext, tensors: Sequence[Tensor], name: str) -> None:
    if name == "h":
        free_saved(tensors[1])
    elif name != "a" or ctx.call.plan.fc2.quantized_wgrad:
        ctx.saved[name].free(tensors)


class _SavedOperands:
    """The BackwardOperands of a grouped MLP: what its forward has saved, and dy."""

    def __init__(
        self, ctx: MlpContext, tensors: Sequence[Tensor], dy: Tensor, done_with: Callable[[Part], None]
    ) -> None:
        self._call, self._saved, self._tensors = ctx.call, ctx.saved, tensors
        self._dy, self.done_with = [dy], done_with
        sizes, self._h, self.probs, self.bias2, self.bias2_scales = tensors[:5]
        self.sizes = sizes if isinstance(ctx.call.sizes, Tensor) else ctx.call.sizes

    holds_dy, makes_h, awaits_dy = True, False, False
    dy_of_tokens = None

    def dy(self) -> Tensor:
        return self._dy.pop()

    def h(self) -> Tensor:
        return self._h

    def x(self) -> Matrix:
        return self._rows("x")

    def a(self, h: Tensor, seed: DrawnSeed) -> Matrix:
        if self._call.plan.fc2.quantized_wgrad:
            return self._rows("a")
        return activation_again(self._call, h, self.probs, seed)

    def w1(self) -> Matrix:
        return self._load("w1")

    def w2(self) -> Matrix:
        return self._load("w2")

    def of_x(self, dx: Tensor) -> Callable[[], Tensor]:
        return lambda: dx

    def _rows(self, name: str) -> Matrix:
        return with_sizes(self._load(name), self.sizes)

    def _load(self, name: str) -> Matrix:
        return self._saved[name].load(self._tensors)


def _backward(ctx: MlpContext, dy: Tensor) -> list[Tensor | None]:
    needs = Needs(*needed_gradients(ctx, ctx.needs_input_grad[2:], dy))
    note_left_out(ctx, needs.postponed, ctx.call.fc1, ctx.call.fc2)
    check_not_freed(ctx.freed)
    beside = ctx.recorded is not None and _is_compiling() and is_plain(dy)
    run = _beside_graph if beside else _run_backward
    found = run(ctx, saved_tensors(ctx), dy, needs)
    ctx.freed = False  # it has ended: autograd refuses another one in its own words
    return cast_gradients((*found, None), ctx.dtypes)


def _run_backward(ctx: MlpContext, tensors: tuple[Tensor, ...], dy: Tensor, needs: Needs) -> Gradients:
    ctx.call.check_states(dy)
    call, done_with, recorded = ctx.call, freeing(ctx, dy, partial(_free, ctx, tensors)), ctx.recorded
    given = None if recorded is None else _given_to_backward(ctx, tensors, dy)
    if recorded is None or given is None:
        return _composed_backward(ctx, tensors, dy, needs, done_with)
    assert call.plan.recorder is not None  # forward was written down
    compose = partial(_composed_backward, ctx, tensors, given[0], needs)  # type: ignore[arg-type]  # dy is given
    found, run_again = recorded.run_backward(needs, given, call.plan.recorder, compose, done_with)
    if run_again:
        call.mark_states()
    return Gradients(*found)


# compiled autograd traces the backward of a forward that was eager, and what it traces has no addresses
_beside_graph = torch.compiler.disable(_run_backward)  # type: ignore[no-untyped-call]


def _given_to_backward(ctx: MlpContext, tensors: Sequence[Tensor | None], dy: Tensor) -> Given | None:
    call = ctx.call
    if call.fc1.target is not None or call.fc2.target is not None:
        return None  # what becomes of a weight's gradient is not a launch alone
    sizes, *operands = tensors
    assert sizes is not None  # of a forward that was written down
    return readable_in_place([dy.contiguous(), *operands], [sizes, *call.state_tensors()])


def _composed_backward(
    ctx: MlpContext, tensors: Sequence[Tensor], dy: Tensor, needs: Needs, done_with: Callable[[Part], None]
) -> Gradients:
    if ctx.recorded is not None:
        ctx.call.set_sizes(tensors[0], dy.shape[0], dy)
    return gradients(ctx.call, needs, _SavedOperands(ctx, tensors, dy, done_with))


grouped_mlp_function: Callable[..., Tensor] = GroupedMLPFunction.apply
