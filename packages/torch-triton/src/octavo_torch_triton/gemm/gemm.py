"""Fprop, Dgrad and Wgrad: the bound functions of GEMM requests, as octavo_registry.contract.gemm has them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import GroupedTensorSpec
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction
from octavo_torch.plugin_api import DTYPE_NAMES, GroupedTensor
from octavo_torch_triton.arrays.row_index import RowIndex, index_of
from octavo_torch_triton.gemm import operators
from octavo_triton.layouts import TURNED
from octavo_triton.products.spec import Chip, GemmSpec, quantized, spec_text

GroupSizes = Tensor | RowIndex
Operand = GroupedTensor | Tensor
Planes = tuple[Tensor, Tensor | None, Tensor | None]


class _Gemm:
    """What the three have in common: `gemm` on `chip`, its result in `dtype` unless `out` has another."""

    def __init__(self, gemm: str, chip: Chip, dtype: DType) -> None:
        self._gemm, self._chip, self._dtype = gemm, chip, dtype
        self._texts: dict[tuple[object, ...], tuple[GroupedTensorSpec | None, GroupedTensorSpec | None, str]] = {}

    def _run(
        self,
        operands: tuple[Operand, Operand],
        directions: tuple[Direction, Direction],
        group_sizes: GroupSizes,
        out: Tensor | None,
        accumulate: bool = False,
        bias: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Tensor:
        left, right = operands
        a: Planes
        b: Planes
        dtype: DType = self._dtype if out is None else DTYPE_NAMES[out.dtype]
        if isinstance(left, GroupedTensor) and isinstance(right, GroupedTensor):
            a, b = left.plane(directions[0]), right.plane(directions[1])
            sizes = group_sizes if isinstance(group_sizes, RowIndex) else left.group_sizes
            assert sizes is not None  # the left operand is ragged
            index = index_of(sizes, left.spec.shape[0], a[0])
            text = self._quantized_text((left.spec, right.spec), directions, dtype, accumulate)
        elif isinstance(left, Tensor) and isinstance(right, Tensor):
            if left.dtype is not right.dtype:
                common = torch.promote_types(left.dtype, right.dtype)
                left, right = left.to(common), right.to(common)
            a, b = (left, None, None), (right, None, None)
            index = index_of(group_sizes, left.shape[0], left)
            text = spec_text(
                GemmSpec(self._gemm, self._chip, dtype, dtype=DTYPE_NAMES[left.dtype], accumulate=accumulate)
            )
        else:
            raise ValueError(
                f"the operands of {self._gemm} are a {type(left).__name__} and a {type(right).__name__}; "
                "give two GroupedTensors or two tensors"
            )
        shape = self._shape(left.shape, right.shape, index.groups)
        inputs = (*a, *b, index.table, *bias, text, shape)
        if out is None:
            result: Tensor = operators.gemm(*inputs)
            return result
        if tuple(out.shape) != tuple(shape):
            raise ValueError(f"out has shape {list(out.shape)} and the result of {self._gemm} {shape}; give that shape")
        operators.gemm_into(*inputs, out)
        return out

    def _quantized_text(
        self,
        specs: tuple[GroupedTensorSpec, GroupedTensorSpec],
        directions: tuple[Direction, Direction],
        dtype: DType,
        accumulate: bool,
    ) -> str:
        # specs are found by identity, because comparing one costs more than a launch; kept, so that ids stay theirs
        left, right = specs
        key = (id(left), id(right), dtype, accumulate)
        known = self._texts.get(key)
        if known is None:
            made = quantized(self._gemm, self._chip, left.quantizer, right.quantizer, dtype, accumulate)
            for spec, direction in zip(specs, directions, strict=True):
                rowwise = direction == "rowwise"
                layout = spec.rowwise_layout if rowwise else spec.columnwise_layout
                wanted = TURNED if made.turned and not rowwise else PLAIN
                if layout != wanted:
                    raise ValueError(
                        f"{direction} data of an operand of {self._gemm} are in layout {layout!r} and it reads "
                        f"{wanted!r}; octavo_torch.convert_layout makes that"
                    )
            text = spec_text(made)
            if len(self._texts) >= 1024:
                self._texts.clear()
            known = self._texts[key] = (left, right, text)
        return known[2]

    def _shape(self, left: tuple[int, ...], right: tuple[int, ...], groups: int) -> list[int]:
        if self._gemm == "wgrad":
            fits = len(left) == len(right) == 2 and left[0] == right[0]
            shape = [groups, left[-1], right[-1]]
        else:
            depth, columns = (1, 2) if self._gemm == "dgrad" else (2, 1)
            fits = len(left) == 2 and len(right) == 3 and right[0] == groups and left[1] == right[depth]
            shape = [left[0], right[columns]] if fits else []
        if not fits:
            raise ValueError(
                f"the operands of {self._gemm} have shapes {list(left)} and {list(right)} in {groups} groups, which do "
                "not fit; x is [M, K], w [G, N, K] and dy [M, N]"
            )
        return shape


class Fprop(_Gemm):
    """y[r] = x[r] w[g]^T, and the bias."""

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
        return self._run((x, w), ("rowwise", "rowwise"), group_sizes, out, bias=(bias, bias_scales))


class Dgrad(_Gemm):
    """dx[r] = dy[r] w[g]."""

    def __call__(self, dy: Operand, w: Operand, group_sizes: GroupSizes, *, out: Tensor | None = None) -> Tensor:
        """dx [M, K]; rows past the sum are +0."""
        return self._run((dy, w), ("rowwise", "columnwise"), group_sizes, out)


class Wgrad(_Gemm):
    """dw[g] = dy_g^T x_g."""

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
        directions: tuple[Direction, Direction] = ("columnwise", "columnwise")
        return self._run((dy, x), directions, group_sizes, out, accumulate and out is not None)
