"""Fprop, Dgrad and Wgrad: the bound functions of GEMM requests, as octavo_registry.contract.gemm has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from octavo import GroupedTensorSpec
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo.recipe_base import Gemm
from octavo_registry.contract import Weight, gemm_form
from octavo_torch.plugin_api import DTYPE_NAMES, GroupedTensor
from octavo_torch_triton.arrays.row_index import RowIndex, index_of
from octavo_torch_triton.gemm import operators
from octavo_triton.layouts import TURNED
from octavo_triton.products.shapes import product_shape
from octavo_triton.products.spec import Chip, GemmSpec, quantized, spec_text

GroupSizes = Tensor | RowIndex
Operand = GroupedTensor | Tensor
Planes = tuple[Tensor, Tensor | None, Tensor | None]


class _Gemm:
    """What the three have in common: a product on `chip`, its result in `dtype` unless `out` has another.

    w and dw lie as `weight` says: "nk" as [G, N, K], "kn" as [G, K, N]; see octavo_registry.contract.weights.
    """

    gemm: ClassVar[Gemm]

    def __init__(self, chip: Chip, dtype: DType, weight: Weight = "nk") -> None:
        self._form, self._chip, self._dtype = gemm_form(self.gemm, weight), chip, dtype
        self._texts: dict[tuple[object, ...], tuple[GroupedTensorSpec | None, GroupedTensorSpec | None, str]] = {}

    def _run(
        self,
        operands: Mapping[str, Operand],
        group_sizes: GroupSizes,
        out: Tensor | None,
        accumulate: bool = False,
        bias: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Tensor:
        directions = self._form.directions
        left, right = (operands[name] for name in self._form.operands)
        a: Planes
        b: Planes
        dtype: DType = self._dtype if out is None else DTYPE_NAMES[out.dtype]
        if isinstance(left, GroupedTensor) and isinstance(right, GroupedTensor):
            a, b = left.plane(directions[0]), right.plane(directions[1])
            sizes = group_sizes if isinstance(group_sizes, RowIndex) else left.group_sizes
            assert sizes is not None  # the left operand is ragged
            index = index_of(sizes, left.spec.shape[0], a[0])
            text = self._quantized_text((left.spec, right.spec), dtype, accumulate)
        elif isinstance(left, Tensor) and isinstance(right, Tensor):
            if left.dtype is not right.dtype:
                common = torch.promote_types(left.dtype, right.dtype)
                left, right = left.to(common), right.to(common)
            a, b = (left, None, None), (right, None, None)
            index = index_of(group_sizes, left.shape[0], left)
            text = spec_text(
                GemmSpec(self._form.kernel, self._chip, dtype, dtype=DTYPE_NAMES[left.dtype], accumulate=accumulate)
            )
        else:
            raise ValueError(
                f"{' and '.join(self._form.operands)} are a {type(left).__name__} and a {type(right).__name__}; "
                "give two GroupedTensors or two tensors"
            )
        shape = product_shape(
            self._form.kernel, self._form.operands, tuple(left.shape), tuple(right.shape), index.groups
        )
        inputs = (*a, *b, index.table, *bias, text, [*shape])
        if out is None:
            result: Tensor = operators.gemm(*inputs)
            return result
        if tuple(out.shape) != shape:
            raise ValueError(f"out has shape {list(out.shape)} and the result {list(shape)}; give that shape")
        operators.gemm_into(*inputs, out)
        return out

    def _quantized_text(
        self,
        specs: tuple[GroupedTensorSpec, GroupedTensorSpec],
        dtype: DType,
        accumulate: bool,
    ) -> str:
        # specs are found by identity, because comparing one costs more than a launch; kept, so that ids stay theirs
        left, right = specs
        key = (id(left), id(right), dtype, accumulate)
        known = self._texts.get(key)
        if known is None:
            made = quantized(self._form.kernel, self._chip, left.quantizer, right.quantizer, dtype, accumulate)
            for name, spec, direction in zip(self._form.operands, specs, self._form.directions, strict=True):
                rowwise = direction == "rowwise"
                layout = spec.rowwise_layout if rowwise else spec.columnwise_layout
                wanted = TURNED if made.turned and not rowwise else PLAIN
                if layout != wanted:
                    raise ValueError(
                        f"{direction} data of {name} are in layout {layout!r} and this product reads {wanted!r}; "
                        "octavo_torch.convert_layout makes that"
                    )
            text = spec_text(made)
            if len(self._texts) >= 1024:
                self._texts.clear()
            known = self._texts[key] = (left, right, text)
        return known[2]


class Fprop(_Gemm):
    """y[r] = x[r] w[g]^T, and the bias."""

    gemm = "fprop"

    def __call__(
        self,
        x: Operand,
        w: Operand,
        group_sizes: GroupSizes,
        *,
        bias: Tensor | None = None,
        bias_scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """y [M, N]; rows past the sum are +0."""
        return self._run({"x": x, "w": w}, group_sizes, out, bias=(bias, bias_scales))


class Dgrad(_Gemm):
    """dx[r] = dy[r] w[g]."""

    gemm = "dgrad"

    def __call__(self, dy: Operand, w: Operand, group_sizes: GroupSizes, *, out: Tensor | None = None) -> Tensor:
        """dx [M, K]; rows past the sum are +0."""
        return self._run({"dy": dy, "w": w}, group_sizes, out)


class Wgrad(_Gemm):
    """dw[g] = dy_g^T x_g."""

    gemm = "wgrad"

    def __call__(
        self,
        x: Operand,
        dy: Operand,
        group_sizes: GroupSizes,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        """dw [G, N, K]; +0 for a group without rows, or with `accumulate` the bits that `out` has there."""
        return self._run({"x": x, "dy": dy}, group_sizes, out, accumulate and out is not None)
