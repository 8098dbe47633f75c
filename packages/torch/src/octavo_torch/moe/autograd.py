"""A MoE layer as one node of autograd, from tokens to combined tokens.

Forward:   x by row -> fc1 -> h -> activation x weights -> fc2 -> rows summed by token
Backward:  dy by row -> fc2's gradients -> activation's gradient -> fc1's gradients -> dx summed by token

What is kept in between is the call's form: everything, or x by token and h, or h as codes, or x alone. Whatever else
backward reads is made again, by the functions that made it: routing, x by row and its column codes, the activation's
column codes, and on demand the weights' column codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from octavo_registry.contract.moves import TokenRows
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.sizes import Sizes, group_sizes_of
from octavo_torch.compiler.operators import Operators
from octavo_torch.compiler.refused_derivatives import FirstOrderFunction, check_no_graph
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.dispatch.layer import PLANES_OF, Matrix, Rows
from octavo_torch.linear.autograd import (
    Context,
    Saved,
    cast_gradients,
    dtypes_of,
    free_saved,
    may_free,
    needed_gradients,
    note_left_out,
    quantize_operand,
)
from octavo_torch.linear.contexts import run_backward
from octavo_torch.mlp.call import MlpCall
from octavo_torch.mlp.forward import DrawnSeed, activation_again, activation_of, first_layer
from octavo_torch.mlp.gradients import Needs, check_whole, gradients, is_postponed
from octavo_torch.moe.call import MoeCall, MoeOperands
from octavo_torch.moe.forms import RowCodes, RowReader
from octavo_torch.moe.forward import (
    MoeForward,
    arrive,
    forward,
    quantize_once,
    quantize_tokens,
    rows_for,
    weights_as_rows,
)
from octavo_torch.moe.permutation_autograd import Places

_operators = Operators("octavo_torch")
_after = _operators.define(
    "after(Tensor value, Tensor earlier) -> Tensor",
    lambda value, earlier: value.clone(),
    lambda value, earlier: torch.empty_like(value),
)
"""`value` again, which a compiler cannot have before `earlier`."""


class SavedByName:
    """Tensors that autograd keeps from forward to backward, by name."""

    def __init__(self) -> None:
        self.tensors: list[Tensor | None] = []
        self.places: dict[str, Saved] = {}

    def add(
        self, name: str, value: Matrix | None, own: bool = False, planes: tuple[str, ...] = PLANES_OF["columnwise"]
    ) -> None:
        """Keeps `value` under this name; nothing if it is None.

        own, planes   see Saved
        """
        if isinstance(value, GroupedTensor):
            value = replace(value, group_sizes=None)  # the call's own, which are kept once or made again
        if value is not None:
            self.places[name] = Saved(value, self.tensors, own, planes)


class MoeContext(Context, Protocol):
    """autograd's ctx of a MoE layer.

    saved    where each kept tensor is, by name
    seeds    the seeds with which forward rounded, of fc1 and fc2; None for one that is a tensor, which is kept by name
    reader   reads h's codes; None unless h is kept as codes
    freed    whether a backward has freed what it has read
    dtypes   of the operands; x's is also the dtype of its rows
    """

    call: MoeCall
    saved: dict[str, Saved]
    seeds: list[DrawnSeed]
    reader: RowReader | None
    freed: bool


class MoeFunction(FirstOrderFunction):
    """moe_mlp with gradients of x, experts' weights, choices' weights and biases, each only where it is asked for."""

    @staticmethod
    def forward(
        ctx: MoeContext,
        call: MoeCall,
        choices: Tensor,
        x: Tensor,
        w1: Tensor,
        w2: Tensor,
        weights: Tensor,
        bias1: Tensor | None,
        bias2: Tensor | None,
        anchor: Tensor | None,
    ) -> Tensor:
        """y [T, N]; `anchor` is a DelayedWgrad's."""
        operands = MoeOperands(x, w1, w2, weights, bias1, bias2)
        dtypes = dtypes_of(*operands, anchor)
        choices, operands, arriving = arrive(call, choices, operands)
        result = forward(call, choices, operands, arriving)
        saved = _kept(call, choices, operands, result)
        call.release()
        ctx.save_for_backward(*saved.tensors)
        ctx.saved, ctx.call, ctx.freed = saved.places, call, False
        ctx.seeds = [None if isinstance(seed, Tensor) else seed for seed in result.seeds]
        ctx.reader = result.h.reader if isinstance(result.h, RowCodes) else None
        ctx.dtypes = dtypes
        return result.y

    @staticmethod
    def backward(ctx: MoeContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients in the order of forward's arguments."""
        check_no_graph(dy)
        with torch.no_grad():
            return (None, None, *run_backward(_backward, ctx, dy))


def _kept(call: MoeCall, choices: Tensor, operands: MoeOperands, result: MoeForward) -> SavedByName:
    """What backward reads, of all gradients that may be asked for."""
    fc1, fc2, saved = call.plan.fc1, call.plan.fc2, SavedByName()
    call.forget_sizes()
    reads_h = fc2.need_dx or fc2.need_dw
    if call.form == "keep_all":
        for name, value in (*result.places._asdict().items(), ("sizes", result.sizes)):
            saved.add(name, value)
        if fc1.need_dw:
            gathers = call.moe.wgrad_gathers
            saved.add("x", result.tokens if gathers else result.x, own=not gathers)
        if fc2.need_dw and fc2.quantized_wgrad:
            saved.add("a", result.a, own=True)
    else:
        saved.add("choices", choices)
        if fc1.need_dw or (reads_h and call.form == "recompute"):
            saved.add("x", result.tokens)
    if reads_h or operands.bias2 is not None:
        saved.add("weights", operands.weights)
        saved.add("bias2", operands.bias2)
    h = result.h if reads_h else None
    if isinstance(h, RowCodes):
        saved.add("h", h.codes)
        saved.add("h_scales", h.scales)
    else:
        saved.add("h", h)
    if reads_h and call.form == "recompute":
        saved.add("bias1", operands.bias1)
    _keep_weight("w1", call, operands.w1, result.w1, saved)
    _keep_weight("w2", call, operands.w2, result.w2, saved)
    if call.form == "keep_all" and call.weight_codes == "keep":
        return saved
    for number, layer_call in enumerate((call.fc1, call.fc2)):
        seed = result.seeds[number]
        saved.add(f"seed{number}", seed if isinstance(seed, Tensor) else None)
        # a step may end, which computes other scales, before backward
        saved.add(f"scale{number}", None if layer_call.state is None else layer_call.state.scale.clone())
    return saved


def _keep_weight(name: Literal["w1", "w2"], call: MoeCall, weight: Tensor, read: Matrix, saved: SavedByName) -> None:
    """Keeps the weight or its codes, as dgrad reads them; for w1 also as fprop does, if backward runs that again."""
    layer, codes = (call.plan.fc1, call.fc1.w_codes) if name == "w1" else (call.plan.fc2, call.fc2.w_codes)
    multiplies = name == "w1" and call.form == "recompute" and (call.plan.fc2.need_dx or call.plan.fc2.need_dw)
    of_fprop, of_dgrad = layer.w_planes
    reads_codes = of_fprop if multiplies and layer.quantized_fprop else ()
    reads_codes += of_dgrad if layer.need_dx and layer.quantized_dgrad else ()
    reads_weight = (multiplies and not layer.quantized_fprop) or (layer.need_dx and not layer.quantized_dgrad)
    keeps_codes = isinstance(read, GroupedTensor) and (codes is not None or call.weight_codes == "keep")
    if reads_codes and keeps_codes:
        saved.add(f"{name}_codes", read, codes is None, reads_codes)
    if reads_weight or (reads_codes and not keeps_codes):
        saved.add(name, weight)


class _KeptOperands:
    """The BackwardOperands of a MoE layer: kept, or computed again from what is kept. dy [T, N] is by token."""

    def __init__(self, ctx: MoeContext, dy: Tensor) -> None:
        call = self._call = ctx.call
        self._saved, self._tensors, self._reader = ctx.saved, ctx.saved_tensors, ctx.reader
        self._ctx, self._frees = ctx, may_free(dy)
        check_whole(ctx.freed)
        # in a list, from which it is popped, so that it is not held until the backward ends
        self._dy = [(lambda: dy) if call.token_exchange is None else call.token_exchange.dispatch_gradient(dy)]
        self._seeds = [seed if kept is None else kept for kept, seed in zip(self._pair("seed"), ctx.seeds, strict=True)]
        choices = self._get("choices")
        if choices is None:
            order, position, routed, self._group_sizes = map(self._tensor, ("order", "position", "routed", "sizes"))
            self.places = Places(order, position, routed)
            call.set_sizes(self._group_sizes, order.shape[0])
        else:
            # without _after, a compiler would find that forward has computed the same, and keep it
            self.places, self._group_sizes = call.place(choices if is_plain(dy) else _after(choices, dy))
        weights = self._get("weights")
        self.probs = None if weights is None else weights_as_rows(call, weights, self.places)
        self.bias2 = self._get("bias2")
        self.bias2_scales = None if self.bias2 is None else self.probs
        scales = self._pair("scale")
        self._scales = None if scales[0] is None or scales[1] is None else (scales[0], scales[1])

    @property
    def sizes(self) -> Sizes:
        return self._call.sizes

    holds_dy = False  # rows of it are made

    @property
    def awaits_dy(self) -> bool:
        return self._call.token_exchange is not None

    def dy(self) -> Tensor:
        return self._call.moves.results.permute_rows(self._dy.pop()(), *self.places, None)

    @property
    def dy_codes(self) -> Callable[[DrawnSeed], tuple[Rows, Rows]] | None:
        return self._dy_of_tokens if self._call.moe.dy_of_tokens else None

    @property
    def dy_tokens(self) -> Callable[[], TokenRows[Tensor]] | None:
        return self._dy_as_it_stands if self._call.moe.dy_gathered else None

    def _dy_as_it_stands(self) -> TokenRows[Tensor]:
        call, dy = self._call.fc2, self._dy.pop()()
        if self._call.token_exchange is not None and is_postponed(call) and not call.layer.quantized_wgrad:
            dy = dy.clone()  # where it has arrived, the next message will
        return TokenRows(dy.to(call.layer.row_dtype), *self.places)

    def _dy_of_tokens(self, seed: DrawnSeed) -> tuple[Rows, Rows]:
        call, once = self._call.fc2, self._call.moe.dy_once
        layer, values = call.layer, self._dy_as_it_stands()
        of_dgrad: Rows = values
        of_wgrad: Rows = values
        quantizer = layer.quantizers["dy"] if once is None else once.columns
        if quantizer is not None:
            codes = quantize_tokens(call, quantizer, "dy", values.tokens, self.places, seed)
            of_dgrad = codes if layer.quantized_dgrad else values
            of_wgrad = codes if layer.quantized_wgrad else values
        if once is not None:
            of_dgrad = quantize_once(once.tokens, "dy", values.tokens, self.places)
        return of_dgrad, of_wgrad

    def h(self) -> Tensor:
        h, call = self._get("h"), self._call
        if self._reader is not None and h is not None:
            return self._reader.rows(h, self._tensor("h_scales"), self._group_sizes, call.plan.fc1.dtype)
        if h is not None:
            return h
        again = call.again(call.moe.forward, self._scales)
        again.fc1.w_codes = self._codes("w1")
        w1, tokens = self._get("w1"), self._tensor("x")
        rows = rows_for(again, self._seeds[0], tokens, self.places)
        # if the product reads codes alone, any tensor will do as the weight
        return first_layer(again, self._seeds[0], rows, tokens if w1 is None else w1, self._get("bias1")).h

    def x(self) -> Rows:
        if self._call.moe.wgrad_gathers:
            return TokenRows(self._tensor("x"), *self.places)
        if self._call.form == "keep_all":
            return self._kept("x")
        again, tokens = self._backward_call(), self._tensor("x")
        if again.plan.fc1.takes_tokens("x"):
            quantizer = again.plan.fc1.quantizers["x"]
            return quantize_tokens(again.fc1, quantizer, "x", tokens, self.places, self._seeds[0])
        quantize, rows = again.plan.fc1.quantize_x, self._call.moves.tokens.permute_rows(tokens, *self.places, None)
        return rows if quantize is None else quantize_operand(again.fc1, quantize, "x", rows, self._seeds[0])

    def a(self, h: Tensor, seed: DrawnSeed) -> Matrix:
        call = self._call
        if not call.plan.fc2.quantized_wgrad:
            return activation_again(call, h, self.probs, seed)
        if "a" in self._saved:
            return self._kept("a")
        _, codes = activation_of(self._backward_call(), h, self.probs, self._seeds[1])
        assert codes is not None  # a quantized wgrad reads them
        return codes

    def w1(self) -> Matrix:
        return self._weight("w1")

    def w2(self) -> Matrix:
        return self._weight("w2")

    def of_x(self, dx: Tensor) -> Callable[[], Tensor]:
        dtype = self._ctx.dtypes[0]
        rows = dx if dx.dtype is dtype else dx.to(dtype)
        return self._call.combine(self._call.moves.tokens, rows, self.places)

    def done_with(self, name: Literal["h", "x", "a", "w1", "w2"]) -> None:
        if not self._frees:
            return
        self._ctx.freed = True
        if name == "h":
            for part in ("h", "h_scales"):
                if part in self._saved:
                    free_saved(self._tensor(part))
            return
        kept = self._saved.get(f"{name}_codes" if name in ("w1", "w2") else name)
        if kept is not None:
            kept.free(self._tensors)

    def _weight(self, name: Literal["w1", "w2"]) -> Matrix:
        """As dgrad reads it."""
        number = ("w1", "w2").index(name)
        layer = (self._call.plan.fc1, self._call.plan.fc2)[number]
        if not layer.quantized_dgrad:
            return self._tensor(name)
        codes = self._codes(name)
        if codes is not None:
            return codes
        again, weight = self._backward_call(), self._tensor(name)
        layer_call = (again.fc1, again.fc2)[number]
        quantize = layer_call.layer.quantize_w
        assert quantize is not None  # of what forward did not keep
        return quantize_operand(layer_call, quantize, "w", weight, self._seeds[number])

    def _kept(self, name: str) -> Matrix:
        value = self._saved[name].load(self._tensors)
        if isinstance(value, GroupedTensor):
            value.group_sizes = group_sizes_of(self.sizes)
        return value

    def _backward_call(self) -> MlpCall:
        return self._call.again(self._call.moe.backward, self._scales)

    def _codes(self, name: str) -> GroupedTensor | None:
        kept = self._saved.get(f"{name}_codes")
        codes = None if kept is None else kept.load(self._tensors)
        assert not isinstance(codes, Tensor)
        return codes

    def _get(self, name: str) -> Tensor | None:
        return self._tensor(name) if name in self._saved else None

    def _tensor(self, name: str) -> Tensor:
        value = self._saved[name].load(self._tensors)
        assert isinstance(value, Tensor)
        return value

    def _pair(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        return self._get(f"{name}0"), self._get(f"{name}1")


def _backward(ctx: MoeContext, dy: Tensor) -> list[Tensor | None]:
    need_x, need_w1, need_w2, need_weights, need_b1, need_b2, later = needed_gradients(
        ctx, ctx.needs_input_grad[2:], dy
    )
    note_left_out(ctx, later, ctx.call.fc1, ctx.call.fc2)
    of_bias2 = need_weights and ctx.dtypes[5] is not None
    needs = Needs(need_x, need_w1, need_w2, need_weights, need_b1, need_b2, of_bias2, later)
    moves, token_exchange = ctx.call.moves, ctx.call.token_exchange
    operands = _KeptOperands(ctx, dy)
    del dy
    grads = gradients(ctx.call, needs, operands)
    _, position, routed = operands.places
    dprobs = _sum(grads.probs, grads.bias2_scales)
    if dprobs is not None:
        by_choice = moves.weights.combine_rows(dprobs[:, None], position.view(-1, 1), routed.view(-1, 1), None)
        dprobs = by_choice.view(position.shape)
        if token_exchange is not None:
            dprobs = token_exchange.combine_weights(dprobs)
    return cast_gradients((grads.x, grads.w1, grads.w2, dprobs, grads.bias1, grads.bias2, None), ctx.dtypes)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return first if second is None else second if first is None else first + second


moe_function: Callable[..., Tensor] = MoeFunction.apply
