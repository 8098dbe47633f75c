"""The operands of a MoE layer's backward: kept by its forward, or made again by the functions that made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from octavo_registry.contract.moves import TokenRows
from octavo_torch.arrays.grouped_tensor import GroupedTensor, Matrix, Rows
from octavo_torch.arrays.sizes import Sizes
from octavo_torch.autograd.saved import free_saved, with_sizes
from octavo_torch.compiler.operators import Operators
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.linear.autograd import quantize_operand
from octavo_torch.mlp.call import MlpCall
from octavo_torch.mlp.forward import activation_again, activation_of, first_layer
from octavo_torch.mlp.gradients import Part, is_postponed
from octavo_torch.moe.forward import codes_of_tokens, quantize_tokens, rows_for, weights_as_rows
from octavo_torch.moe.rows.derivatives import Places
from octavo_torch.moe.saved import MoeContext
from octavo_torch.moe.tokens import Read
from octavo_torch.scaling.seeds import DrawnSeed

_operators = Operators("octavo_torch")
_after = _operators.define(
    "after(Tensor value, Tensor earlier) -> Tensor",
    lambda value, earlier: value.clone(),
    lambda value, earlier: torch.empty_like(value),
)
"""A copy of `value` that a compiler cannot compute before `earlier`."""


def free_kept(ctx: MoeContext, tensors: Sequence[Tensor], name: str) -> None:
    """Frees the operand of this name among what forward has kept."""
    if name == "h":
        for part in ("h", "h_scales"):
            if part in ctx.kept.saved:
                free_saved(tensors[ctx.kept.saved[part].start])
        return
    kept = ctx.kept.saved.get(f"{name}_codes" if name in ("w1", "w2") else name)
    if kept is not None:
        kept.free(tensors)


class KeptOperands:
    """The BackwardOperands of a MoE layer: kept, or computed again from what is kept."""

    def __init__(
        self, ctx: MoeContext, tensors: Sequence[Tensor], dy: Tensor, done_with: Callable[[Part], None]
    ) -> None:
        """dy [T, N] is by token; `tensors` are those that forward has saved."""
        call = self._call = ctx.call
        self._saved, self._tensors, self._reader = ctx.kept.saved, tensors, ctx.kept.reader
        self._ctx, self.done_with = ctx, done_with
        # in a list, from which it is popped, so that it is not held until the backward ends
        self._dy = [(lambda: dy) if call.token_exchange is None else call.token_exchange.dispatch_gradient(dy)]
        self._seeds = [
            seed if kept is None else kept for kept, seed in zip(self._pair("seed"), ctx.kept.seeds, strict=True)
        ]
        choices = self._get("choices")
        if choices is None:
            order, position, routed, self._group_sizes = map(self._tensor, ("order", "position", "routed", "sizes"))
            self.places = Places(order, position, routed)
            call.set_sizes(self._group_sizes, order.shape[0], self._group_sizes)
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

    holds_dy = False  # `dy` permutes it into rows of the backward's own

    @property
    def makes_h(self) -> bool:
        return "h" not in self._saved

    @property
    def awaits_dy(self) -> bool:
        return self._call.token_exchange is not None

    def dy(self) -> Tensor:
        return self._call.moves.results.permute_rows(self._dy.pop()(), *self.places, None)

    @property
    def dy_of_tokens(self) -> Callable[[DrawnSeed], tuple[Rows, Rows]] | None:
        return None if self._call.moe.dy_in_dgrad == "rows" else self._dy_of_tokens

    def _dy_of_tokens(self, seed: DrawnSeed) -> tuple[Rows, Rows]:
        call, moe, dy = self._call.fc2, self._call.moe, self._dy.pop()()
        if self._call.token_exchange is not None and is_postponed(call) and moe.dy_in_wgrad == "tokens":
            dy = dy.clone()  # the next message overwrites the buffer in which it has arrived
        dy = dy.to(call.layer.row_dtype)
        values = TokenRows(dy, *self.places)
        made: dict[Read, Rows] = {"tokens": values}
        if "dy" in moe.dy_rows.quantizers:
            made["codes of rows"] = quantize_tokens(call, moe.dy_rows.of_tokens["dy"], "dy", dy, self.places, seed)
        if moe.dy_token_quantizer is not None:
            made["codes of tokens"] = codes_of_tokens(moe.dy_token_quantizer, "dy", dy, self.places)
        # a GEMM that is not needed reads nothing
        return made.get(moe.dy_in_dgrad, values), made.get(moe.dy_in_wgrad, values)

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
        read = self._call.moe.x_in_wgrad
        if read == "kept":
            return self._kept("x")
        tokens = self._tensor("x")
        if read == "tokens":
            return TokenRows(tokens, *self.places)
        again = self._backward_call.fc1
        if read == "codes of rows":
            return quantize_tokens(again, again.layer.of_tokens["x"], "x", tokens, self.places, self._seeds[0])
        quantize, rows = again.layer.quantize_x, self._call.moves.tokens.permute_rows(tokens, *self.places, None)
        return rows if quantize is None else quantize_operand(again, quantize, "x", rows, self._seeds[0])

    def a(self, h: Tensor, seed: DrawnSeed) -> Matrix:
        call = self._call
        if not call.plan.fc2.quantized_wgrad:
            return activation_again(call, h, self.probs, seed)
        if "a" in self._saved:
            return self._kept("a")
        _, codes = activation_of(self._backward_call, h, self.probs, self._seeds[1])
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

    def _weight(self, name: Literal["w1", "w2"]) -> Matrix:
        """The weight as dgrad reads it."""
        number = ("w1", "w2").index(name)
        layer = (self._call.plan.fc1, self._call.plan.fc2)[number]
        if not layer.quantized_dgrad:
            return self._tensor(name)
        codes = self._codes(name)
        if codes is not None:
            return codes
        again, weight = self._backward_call, self._tensor(name)
        layer_call = (again.fc1, again.fc2)[number]
        quantize = layer_call.layer.quantize_w
        assert quantize is not None  # of what forward did not keep
        return quantize_operand(layer_call, quantize, "w", weight, self._seeds[number])

    def _kept(self, name: str) -> Matrix:
        return with_sizes(self._saved[name].load(self._tensors), self.sizes)

    @cached_property  # copies of three calls, which take as long as several launches
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
