"""What a MoE layer's backward pass computes again, by the same functions as the forward pass and with the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from jax import Array

from octavo.recipe_base import Gemm
from octavo_jax.arrays.gemm_operands import GemmOperand, RowOperand, RowsOrTokens
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.layer import Layer
from octavo_jax.linear.computed_operands import ComputedOperand, activated_operand, wgrad_x_if_quantized
from octavo_jax.linear.gemms import fprop
from octavo_jax.linear.operands import (
    Context,
    QuantizedOperand,
    dgrad_weight,
    quantize_operand,
    stored_weight,
    wgrad_x,
)
from octavo_jax.linear.two_forms import Quantized, read_form
from octavo_jax.mlp.autograd import DyOperands, Residuals, fc2_context_of, history_of
from octavo_jax.mlp.plan import Mlp
from octavo_jax.moe.layer.forms import kept_rows
from octavo_jax.moe.layer.residuals import KeptKernel, MoeResiduals, kernel_plane
from octavo_jax.moe.layer.tokens import Tokens, dy_sources, gathered_rows, quantize_tokens, quantizes_tokens
from octavo_jax.moe.permutation import weights_by_row
from octavo_jax.scaling.delayed_state import DelayedState


class _ExpertLayer(NamedTuple):
    """fc1 or fc2 of the experts in the backward pass.

    forward, backward   the layer with the quantizers of what the forward pass reads, and of what the gradients read
    kernel              what was kept of it
    state               of delayed scaling, with the forward's amaxes; else None
    """

    forward: Layer
    backward: Layer
    kernel: KeptKernel
    bias: Array | None
    context: Context
    state: DelayedState | None

    def fprop(self, x: RowsOrTokens, xq: Quantized | None) -> Array:
        """The layer's result, once more."""
        layer, kernel = self.forward, self.kernel
        # Where only the codes were kept, the product reads these alone, and any array may stand for the kernel's.
        w = self.context.group_sizes if kernel.array is None else stored_weight(layer, kernel.array)
        wq: Quantized | None = kernel.codes
        if wq is None:
            wq = quantize_operand(layer, w, "w", self.context, history_of(self.state, "kernel")).q
        return fprop(layer, x, xq, w, wq, self.bias, self.context)

    def dgrad_operand(self) -> GemmOperand:
        """What dgrad reads of the kernel."""
        layer, kernel = self.backward, self.kernel
        if not layer.plan.recipe.quantizes("dgrad"):
            assert kernel.array is not None
            return kernel.array
        if kernel.codes is not None:
            both = kernel.codes.rowwise is not None and kernel.codes.columnwise is not None
            return kernel_plane(layer, kernel.codes, "dgrad") if both else kernel.codes
        assert kernel.array is not None
        w, history = stored_weight(layer, kernel.array), history_of(self.state, "kernel")
        wq = quantize_operand(layer, w, "w", self.context, history).q
        return dgrad_weight(layer, kernel.array, read_form(wq))


class Recomputed:
    """The arrays that the experts' own backward pass reads, taken from what was kept or computed again from it."""

    def __init__(self, kept: MoeResiduals) -> None:
        forward, backward, (state1, state2) = kept.forward_mlp, kept.backward_mlp, kept.states or (None, None)
        fc2_context = fc2_context_of(kept.context)
        self._kept = kept
        self._fc1 = _ExpertLayer(forward.fc1, backward.fc1, kept.wi, kept.bi, kept.context, state1)
        self._fc2 = _ExpertLayer(forward.fc2, backward.fc2, kept.wo, kept.bo, fc2_context, state2)
        self._tokens = None if kept.x is None else Tokens(kept.x, *kept.row_order)
        on_output = kept.plan.weights_on == "output"
        self._probs = None if on_output else weights_by_row(kept.weights, kept.row_order.order)
        self._h = self._fc1_result()
        self.results = self._expert_results() if on_output and kept.results is None else kept.results
        """The experts' results [R, N]; None unless the weights multiply these."""

    def mlp_residuals(self) -> Residuals:
        """What the experts' own backward pass reads."""
        kept = self._kept
        return Residuals(
            mlp=kept.plan.mlp,
            norm=None,
            x1=self._x1(),
            w1=self._fc1.dgrad_operand(),
            y1=self._h,
            x2=self._x2(),
            w2=self._fc2.dgrad_operand(),
            bi=kept.bi,
            bo=kept.bo,
            probs=self._probs,
            bo_scales=None if kept.bo is None else self._probs,
            context=kept.context,
            states=kept.states,
        )

    def dy_operands(self, dy: Tokens) -> DyOperands:
        """What fc2's GEMMs read of the tokens' gradient `dy`, instead of the rows that their choices make of it."""
        fc2, context = self._kept.plan.mlp.fc2, self._fc2.context
        history = history_of(self._fc2.state, "grad")
        sources = dy_sources(fc2)
        dgrad_tokens, wgrad_tokens = (
            None if source == "rows" else gathered_rows(fc2, "dy", gemm, dy, context)
            for gemm, source in sources.items()
        )
        gathered = zip(sources, (dgrad_tokens, wgrad_tokens), strict=True)
        read_rows = tuple(gemm for gemm, tokens in gathered if tokens is None)
        quantized: QuantizedOperand | None = None
        if not read_rows:
            quantized = QuantizedOperand(None, history)
        elif quantizes_tokens(fc2, "dy", read_rows):
            quantized = quantize_tokens(fc2, dy, "dy", context, history)
        return DyOperands(quantized, dgrad_tokens, wgrad_tokens)

    def _fc1_result(self) -> Array:
        kept, fc1 = self._kept, self._fc1.forward
        if isinstance(kept.h, GroupedTensor):
            return kept_rows(kept.h, kept.context.group_sizes, fc1.y_dtype, fc1.options.backend)
        if kept.h is not None:
            return kept.h
        assert self._tokens is not None
        gathered = gathered_rows(fc1, "x", "fprop", self._tokens, kept.context)
        rows, xq = self._rows_of_x(fc1, "fprop")
        return self._fc1.fprop(rows if gathered is None else gathered, xq)

    def _rows_of_x(self, fc1: Layer, gemm: Gemm) -> tuple[Array, Quantized | None]:
        """The rows of x, and their codes if this GEMM reads them."""
        assert self._tokens is not None
        rows, context = self._tokens.rows(), self._kept.context
        history = history_of(self._fc1.state, "x")
        if quantizes_tokens(fc1, "x", (gemm,)):
            return rows, quantize_tokens(fc1, self._tokens, "x", context, history).q
        return rows, quantize_operand(fc1, rows, "x", context, history).q

    def _expert_results(self) -> Array:
        x2 = self._activated(self._kept.forward_mlp)
        return self._fc2.fprop(x2.array, x2.q)

    def _activated(self, mlp: Mlp) -> ComputedOperand:
        """fc2's x, with the quantizers of this MLP."""
        quantizer, history = mlp.activation_quantizer(self._probs), history_of(self._fc2.state, "x")
        return activated_operand(quantizer, mlp.fc2, self._h, self._fc2.context, history)

    def _x1(self) -> RowOperand:
        """What fc1's wgrad reads of x."""
        kept, fc1 = self._kept, self._fc1.backward
        if kept.x1 is not None:
            return self._with_sizes(kept.x1)
        assert self._tokens is not None
        gathered = gathered_rows(fc1, "x", "wgrad", self._tokens, kept.context)
        if gathered is not None:
            return gathered
        rows, xq = self._rows_of_x(fc1, "wgrad")
        return wgrad_x(fc1, rows, read_form(xq))

    def _x2(self) -> GemmOperand | None:
        """What fc2's wgrad reads of the activation; None if that is an array, which is computed with its gradient."""
        kept, fc2 = self._kept, self._fc2.backward
        if kept.x2 is not None:
            return self._with_sizes(kept.x2)
        if not fc2.plan.recipe.quantizes("wgrad"):
            return None
        x2 = self._activated(kept.backward_mlp)
        return wgrad_x_if_quantized(fc2, x2._replace(q=read_form(x2.q)))

    def _with_sizes(self, operand: GemmOperand) -> GemmOperand:
        if not isinstance(operand, GroupedTensor):
            return operand
        return replace(operand, group_sizes=self._kept.context.group_sizes)
