"""What a MoE layer's backward pass computes again, by the same functions as the forward pass and with the same bits."""

from __future__ import annotations

from dataclasses import replace

from jax import Array

from octavo.recipe_base import Gemm
from octavo_jax.arrays.grouped_tensor import GroupedTensor
from octavo_jax.dispatch.layer import Layer
from octavo_jax.linear.computed_operands import activated_operand, wgrad_x_if_quantized
from octavo_jax.linear.operands import (
    GemmOperand,
    QuantizedOperand,
    Rows,
    dgrad_weight,
    quantize_operand,
    stored_weight,
    wgrad_x,
)
from octavo_jax.linear.products import Values, forward_product
from octavo_jax.linear.two_forms import Quantized, read_form
from octavo_jax.mlp.autograd import DyOperands, Residuals, fc2_context_of, history_of
from octavo_jax.moe.layer.forms import kept_rows
from octavo_jax.moe.layer.kept import Kept, KeptKernel, plane_of
from octavo_jax.moe.layer.tokens import Tokens, dy_reads, gathered_rows, quantize_tokens, reads_tokens
from octavo_jax.moe.permutation import weights_by_row


class Recomputed:
    """The arrays that the experts' own backward pass reads, taken from what was kept or computed again from it."""

    def __init__(self, kept: Kept) -> None:
        self._kept, self._context = kept, kept.context
        self._later = fc2_context_of(kept.context)
        self._states = kept.states or (None, None)
        plan, places = kept.plan, kept.places
        self._tokens = None if kept.x is None else Tokens(kept.x, *places)
        self._probs = None if plan.on_output else weights_by_row(kept.weights, places.order)
        self._h = self._fc1_result()
        self.results = self._results() if plan.on_output and kept.results is None else kept.results
        """The experts' results [R, N]; None unless the weights multiply these."""

    def residuals(self) -> Residuals:
        """What the experts' own backward pass reads."""
        kept = self._kept
        mlp = kept.plan.mlp
        return Residuals(
            mlp=mlp,
            norm=None,
            x1=self._x1(),
            w1=self._dgrad_operand(mlp.fc1, kept.wi, 0),
            y1=self._h,
            x2=self._x2(),
            w2=self._dgrad_operand(mlp.fc2, kept.wo, 1),
            bi=kept.bi,
            bo=kept.bo,
            probs=self._probs,
            bo_scales=None if kept.bo is None else self._probs,
            context=self._context,
            states=kept.states,
        )

    def _fc1_result(self) -> Array:
        kept = self._kept
        fc1 = kept.again[0].fc1
        if isinstance(kept.h, GroupedTensor):
            return kept_rows(kept.h, self._context.group_sizes, fc1.y_dtype, fc1.options.backend)
        if kept.h is not None:
            return kept.h
        assert self._tokens is not None
        gathered = gathered_rows(fc1, "x", "fprop", self._tokens, self._context)
        rows, codes = self._quantized_x(fc1, "fprop")
        return self._product(0, rows if gathered is None else gathered, codes, kept.wi, kept.bi)

    def _quantized_x(self, fc1: Layer, gemm: Gemm) -> tuple[Array, Quantized | None]:
        """x by row, and its codes where this GEMM reads them."""
        assert self._tokens is not None
        rows = self._tokens.rows()
        quantize, history = fc1.plan.quantize_x, history_of(self._states[0], "x")
        if reads_tokens(fc1, quantize, "x", (gemm,)):
            return rows, quantize_tokens(quantize, fc1, self._tokens, "x", self._context, history)[0]
        return rows, quantize_operand(quantize, fc1, rows, "x", self._context, history)[0]

    def dy_operands(self, dy: Tokens) -> DyOperands:
        """What fc2's GEMMs read of the tokens' gradient `dy`, instead of the rows that their choices make of it."""
        fc2 = self._kept.plan.mlp.fc2
        quantize, history = fc2.plan.quantize_dy, history_of(self._states[1], "grad")
        reads = dy_reads(fc2)
        dgrad_tokens, wgrad_tokens = (
            None if read == "rows" else gathered_rows(fc2, "dy", gemm, dy, self._later) for gemm, read in reads.items()
        )
        gathered = zip(reads, (dgrad_tokens, wgrad_tokens), strict=True)
        rows = tuple(gemm for gemm, tokens in gathered if tokens is None)
        quantized: QuantizedOperand | None = None
        if not rows:
            quantized = QuantizedOperand(None, history)
        elif reads_tokens(fc2, quantize, "dy", rows):
            quantized = quantize_tokens(quantize, fc2, dy, "dy", self._later, history)
        return DyOperands(quantized, dgrad_tokens, wgrad_tokens)

    def _results(self) -> Array:
        kept, mlp = self._kept, self._kept.again[0]
        of = mlp.activation_quantizer(self._probs)
        x2 = activated_operand(of, mlp.fc2, self._h, self._later, history_of(self._states[1], "x"))
        return self._product(1, x2.array, x2.q, kept.wo, kept.bo)

    def _product(
        self, number: int, x: Values, codes: Quantized | None, kernel: KeptKernel, bias: Array | None
    ) -> Array:
        """fprop of fc1 (0) or fc2 (1), once more."""
        mlp, context = self._kept.again[0], (self._context, self._later)[number]
        layer = (mlp.fc1, mlp.fc2)[number]
        # Where the product reads codes alone, any array will do.
        w = self._kept.weights if kernel.array is None else stored_weight(layer, kernel.array)
        wq: Quantized | None = kernel.codes
        if wq is None:
            history = history_of(self._states[number], "kernel")
            wq, _ = quantize_operand(layer.plan.quantize_w, layer, w, "w", context, history)
        return forward_product(layer, x, codes, w, wq, bias, context)

    def _x1(self) -> Rows:
        kept = self._kept
        if kept.x1 is not None:
            return self._sized(kept.x1)
        fc1 = kept.again[1].fc1
        assert self._tokens is not None
        gathered = gathered_rows(fc1, "x", "wgrad", self._tokens, self._context)
        if gathered is not None:
            return gathered
        rows, q = self._quantized_x(fc1, "wgrad")
        return wgrad_x(fc1, rows, read_form(q))

    def _x2(self) -> GemmOperand | None:
        kept, mlp = self._kept, self._kept.again[1]
        if kept.x2 is not None:
            return self._sized(kept.x2)
        if not mlp.fc2.plan.recipe.quantizes("wgrad"):
            return None
        of = mlp.activation_quantizer(self._probs)
        x2 = activated_operand(of, mlp.fc2, self._h, self._later, history_of(self._states[1], "x"))
        return wgrad_x_if_quantized(mlp.fc2, x2._replace(q=read_form(x2.q)))

    def _dgrad_operand(self, layer: Layer, kernel: KeptKernel, number: int) -> GemmOperand:
        if not layer.plan.recipe.quantizes("dgrad"):
            assert kernel.array is not None
            return kernel.array
        if kernel.codes is not None:
            both = kernel.codes.rowwise is not None and kernel.codes.columnwise is not None
            return plane_of(layer, kernel.codes, "dgrad") if both else kernel.codes
        assert kernel.array is not None
        mlp = self._kept.again[1]
        again, context = (mlp.fc1, mlp.fc2)[number], (self._context, self._later)[number]
        weight, history = stored_weight(again, kernel.array), history_of(self._states[number], "kernel")
        codes, _ = quantize_operand(again.plan.quantize_w, again, weight, "w", context, history)
        return dgrad_weight(again, kernel.array, read_form(codes))

    def _sized(self, operand: GemmOperand) -> GemmOperand:
        if not isinstance(operand, GroupedTensor):
            return operand
        return replace(operand, group_sizes=self._context.group_sizes)
