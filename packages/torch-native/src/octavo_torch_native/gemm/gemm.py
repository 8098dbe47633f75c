"""Fprop, Dgrad, Wgrad: the bound functions of GEMM requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from octavo import GroupedTensorSpec
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo_native.layouts import VALUES
from octavo_registry.contract import TokenRows, Weight
from octavo_torch.plugin_api import DTYPE_NAMES, DTYPES, Bounded, GroupedTensor, dtype_text
from octavo_torch_native.arrays.group_index import GroupIndex, group_index_of
from octavo_torch_native.arrays.layouts import layout_in_gemm
from octavo_torch_native.gemm import operators as gemm_operators
from octavo_torch_native.gemm.checks import OperandChecks
from octavo_torch_native.gemm.operands import (
    NOT_GATHERED,
    OperandPair,
    gathered,
    native_planes,
    plane_of,
)
from octavo_torch_native.gemm.spec import GemmSpec, Tokens, gemm_text, quantized_gemm
from octavo_torch_native.quantizers.planes import plane_sizes

GroupSizes = Tensor | GroupIndex
Rows = GroupedTensor | Tensor | TokenRows[Tensor]


class GroupedGemm(OperandChecks):
    """One GEMM of a grouped linear layer; the subclasses take its operands as octavo_registry.contract.gemm says.

    Operands are GroupedTensors of one scaling in any layout this package reads, planes of values among them, or
    unquantized tensors. The rows of one of the latter may be TokenRows, on CUDA in bf16; and so may fprop's x and
    dgrad's dy in block scaling and the plain layout, on CUDA in E4M3 beside weights in E4M3. Group sizes of a
    GroupedTensor are its own; a GroupIndex in their place is used as it is. With weight "kn" w and dw are [G, K, N]:
    see octavo_registry.contract.weights, and n and k below are the kernels'.
    """

    def __init__(
        self,
        dtype: DType,
        *,
        weight: Weight = "nk",
        fast_accumulation: bool = False,
        ctas: int = 0,
        interleave: int = 0,
    ) -> None:
        super().__init__(weight)
        self._name, self._dtype = dtype, DTYPES[dtype]
        self._fast, self._ctas, self._interleave = fast_accumulation, ctas, interleave
        self._pairs: Bounded[tuple[int, int, torch.dtype, bool, bool], OperandPair] = Bounded()
        self._texts: Bounded[tuple[torch.dtype, torch.dtype, bool, Tokens], str] = Bounded()

    def limited(self, ctas: int) -> Self:
        """The same GEMM, which takes at most `ctas` CTAs, each with a multiprocessor to itself."""
        return type(self)(
            self._name, weight=self._weight, fast_accumulation=self._fast, ctas=ctas, interleave=self._interleave
        )

    def _run(
        self,
        left: Rows,
        right: Rows,
        group_sizes: GroupSizes,
        out: Tensor | None,
        accumulate: bool = False,
        bias: Tensor | None = None,
        bias_scales: Tensor | None = None,
    ) -> Tensor:
        dtype = self._dtype if out is None else out.dtype
        index: GroupIndex | None
        gathering = NOT_GATHERED
        if isinstance(left, TokenRows) and isinstance(left.tokens, GroupedTensor) == isinstance(right, GroupedTensor):
            gathering, left = gathered("left", left), left.tokens
        elif isinstance(right, TokenRows) and isinstance(left, Tensor) and self._kernel == "wgrad":
            gathering, right = gathered("right", right), right.tokens
        order = gathering.order
        if isinstance(left, GroupedTensor) and isinstance(right, GroupedTensor):
            tokens = order is not None
            pair = self._pairs.get((id(left.spec), id(right.spec), dtype, accumulate, tokens))
            if pair is None:
                pair = self._new_pair(left.spec, right.spec, dtype, accumulate, tokens)
            text, rows, n, k, groups = pair.text, pair.rows, pair.n, pair.k, pair.groups
            if order is not None:
                rows = order.shape[0]
            a, b = plane_of(left, self.directions[0]), plane_of(right, self.directions[1])
            sizes = group_sizes if tokens or type(group_sizes) is GroupIndex else left.group_sizes
            index = group_index_of((rows, 0), sizes, a[0])
            assert index is not None
            self._check_planes(pair, a, b, index)
            if pair.convert_left:
                a = native_planes(left.spec, a, index, self.directions[0])
            if pair.convert_right:
                b = native_planes(right.spec, b, index, self.directions[1])
        elif isinstance(left, Tensor) and isinstance(right, Tensor):
            if left.dtype is not right.dtype:
                left, right = self._same_dtype(left, right)
            key = left.dtype, dtype, accumulate, gathering.side
            text = self._texts.get(key) or self._new_text(*key)
            shape, other = left.shape, right.shape
            if order is not None:
                rows = order.shape[0]
                shape = torch.Size((rows, shape[1])) if gathering.side == "left" else shape
                other = torch.Size((rows, other[1])) if gathering.side == "right" else other
            index = group_index_of((shape[0], 0), group_sizes, left)
            assert index is not None
            groups = index.groups
            rows, n, k = self._sides(shape, other, groups)
            a, b = (left, None, None), (right, None, None)
        else:
            raise ValueError(
                f"{self.left} is a {type(left).__name__} and {self.right} a {type(right).__name__}; "
                "give two GroupedTensors, or two tensors, the rows of one of which may be TokenRows"
            )
        inputs = (*a, *b, index.words, bias, bias_scales, order, gathering.each, text, rows, n, k, groups)
        if out is None:
            result: Tensor = gemm_operators.gemm(*inputs)
            return result
        self._check_out(out, rows, n, k, groups, a[0])
        gemm_operators.gemm_into(*inputs, out)
        return out

    # ---- what is worked out once

    def _with_options(self, spec: GemmSpec) -> GemmSpec:
        on_left = self._interleave if self.left == "dy" else 0
        return replace(spec, ctas=self._ctas, left_interleave=on_left, right_interleave=self._interleave - on_left)

    def _new_pair(
        self, left: GroupedTensorSpec, right: GroupedTensorSpec, dtype: torch.dtype, accumulate: bool, tokens: bool
    ) -> OperandPair:
        self._check_quantizers(left, right)
        if tokens:
            self._check_tokens(left)
        elif left.groups != right.groups:
            raise self._misfit(left.shape, right.shape, left.groups)
        spec = quantized_gemm(
            self._kernel, left.quantizer, right.quantizer, self._out_name(dtype), self._fast, accumulate
        )
        rows, n, k = self._sides(left.shape[1:] if tokens else left.shape, right.shape, right.groups)
        of_left, of_right = self.directions
        left_layout, right_layout = layout_in_gemm(left, of_left), layout_in_gemm(right, of_right)
        spec = replace(
            spec,
            tokens="left" if tokens else "none",
            left_values=left_layout == VALUES,
            right_values=right_layout == VALUES,
        )
        pair = self._pairs[id(left), id(right), dtype, accumulate, tokens] = OperandPair(
            (left, right),
            gemm_text(self._with_options(spec)),
            *(rows, n, k, right.groups),
            plane_sizes(left, of_left, left_layout),
            plane_sizes(right, of_right, right_layout),
            convert_left=left_layout == PLAIN and not tokens,
            convert_right=right_layout == PLAIN,
        )
        return pair

    def _new_text(self, dtype: torch.dtype, out_dtype: torch.dtype, accumulate: bool, tokens: Tokens) -> str:
        if dtype not in DTYPE_NAMES:
            raise ValueError(f"{self.left} has dtype {dtype_text(dtype)}; give bfloat16, float16 or float32")
        spec = GemmSpec(
            gemm=self._kernel,
            dtype=DTYPE_NAMES[dtype],
            out_dtype=self._out_name(out_dtype),
            accumulate=accumulate,
            ctas=self._ctas,
            tokens=tokens,
        )
        text = self._texts[dtype, out_dtype, accumulate, tokens] = gemm_text(spec)
        return text


class Fprop(GroupedGemm):
    """y [M, N] = x [M, K] w[g]^T of w [G, N, K], plus bias_scales[r] * bias[g]: one rounding to the result's dtype."""

    gemm = "fprop"

    def __call__(
        self,
        x: Rows,
        w: GroupedTensor | Tensor,
        group_sizes: GroupSizes,
        *,
        bias: Tensor | None = None,
        bias_scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rows past the sum are +0; `out` decides the dtype where it is given."""
        return self._run(x, w, group_sizes, out, False, bias, bias_scales)


class Dgrad(GroupedGemm):
    """dx [M, K] = dy [M, N] w[g]."""

    gemm = "dgrad"

    def __call__(
        self,
        dy: Rows,
        w: GroupedTensor | Tensor,
        group_sizes: GroupSizes,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rows past the sum are +0."""
        return self._run(dy, w, group_sizes, out)


class Wgrad(GroupedGemm):
    """dw [G, N, K] = dy_g^T x_g over the rows of each group.

    With `interleave`, for quantized operands: dy's columns are two halves, and dw's rows alternate in such blocks.
    """

    gemm = "wgrad"

    def __call__(
        self,
        x: Rows,
        dy: Rows,
        group_sizes: GroupSizes,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """A group without rows gives +0; with `accumulate` dw is added to `out` in fp32 and rounded once, and the bits
        of such a group's part stay as they are.
        """
        left, right = (dy, x) if self._weight == "nk" else (x, dy)
        return self._run(left, right, group_sizes, out, accumulate and out is not None)
