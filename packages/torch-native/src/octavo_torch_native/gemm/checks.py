"""OperandChecks: the names of a GEMM's operands, and errors that say in them what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from octavo import GroupedTensorSpec
from octavo.formats import DType
from octavo.recipe_base import Gemm
from octavo_native.gathering import tokens_refusal
from octavo_registry.contract import WEIGHT_SHAPES, Weight, gemm_form
from octavo_torch.plugin_api import DTYPE_NAMES, dtype_text
from octavo_torch_native.arrays.group_index import GroupIndex
from octavo_torch_native.arrays.layouts import layout_of
from octavo_torch_native.gemm.operands import OperandPair, Planes
from octavo_torch_native.quantizers.planes import check_plane


class OperandChecks:
    """The operands of one GEMM as its kernel takes them. Every check raises ValueError.

    left, right   their names, such as x and w
    directions    of the planes that it reads of them
    """

    gemm: ClassVar[Gemm]

    def __init__(self, weight: Weight) -> None:
        form = gemm_form(self.gemm, weight)
        self._weight, self._kernel, self.directions = weight, form.kernel, form.directions
        self.left, self.right = form.operands

    def _sides(self, left: Sequence[int], right: Sequence[int], groups: int) -> tuple[int, int, int]:
        """rows, n and k of the kernel; ValueError where the operands' shapes do not go together."""
        if self._kernel == "wgrad":
            if len(left) != 2 or len(right) != 2 or left[0] != right[0]:
                raise self._misfit(left, right, groups)
            return left[0], left[1], right[1]
        shared = 2 if self._kernel == "fprop" else 1
        if len(left) != 2 or len(right) != 3 or left[1] != right[shared] or right[0] != groups:
            raise self._misfit(left, right, groups)
        return left[0], right[1], right[2]

    def _misfit(self, left: Sequence[int], right: Sequence[int], groups: int) -> ValueError:
        w = f"w {WEIGHT_SHAPES[self._weight]}"
        needed = {"fprop": f"x [M, K], {w}", "dgrad": f"dy [M, N], {w}", "wgrad": "x [M, K], dy [M, N]"}
        return ValueError(
            f"{self.left} has shape {list(left)}, {self.right} {list(right)} and there are {groups} group sizes; "
            f"give {needed[self.gemm]} and one size per group"
        )

    def _check_tokens(self, tokens: GroupedTensorSpec) -> None:
        layout = layout_of(tokens, self.directions[0])
        if refusal := tokens_refusal(self.left, self.gemm, tokens.quantizer.scaling, layout, tokens.shape):
            raise ValueError(refusal)

    def _check_quantizers(self, left: GroupedTensorSpec, right: GroupedTensorSpec) -> None:
        a, b = left.quantizer, right.quantizer
        if a.scaling != b.scaling:
            raise ValueError(
                f"{self.left} is quantized in {a.scaling} and {self.right} in {b.scaling}; quantize both in one recipe"
            )
        if a.square or (b.square and self.gemm == "wgrad"):
            name = self.left if a.square else self.right
            raise ValueError(f"{name} is quantized in square blocks, which the GEMMs read of w alone; use square=False")
        if self.gemm == "wgrad" and a.hadamard != b.hadamard:
            raise ValueError(
                f"{self.left} has hadamard={a.hadamard} and {self.right} hadamard={b.hadamard}; quantize both alike"
            )

    def _out_name(self, dtype: torch.dtype) -> DType:
        name = DTYPE_NAMES.get(dtype)
        if name is None:
            raise ValueError(f"out has dtype {dtype_text(dtype)}; give bfloat16, float16 or float32")
        return name

    def _check_planes(self, pair: OperandPair, a: Planes, b: Planes, index: GroupIndex) -> None:
        """ValueError for planes, or sizes, that are not what the specs say."""
        check_plane(self.left, pair.left_sizes, pair.specs[0].groups, *a)
        check_plane(self.right, pair.right_sizes, pair.groups, *b)
        if a[0].device != b[0].device:
            raise ValueError(
                f"{self.left}'s codes are on {a[0].device} and {self.right}'s on {b[0].device}; quantize both on one "
                "device"
            )
        if index.groups != pair.groups:
            raise self._misfit(pair.specs[0].shape, pair.specs[1].shape, index.groups)

    def _check_out(self, out: Tensor, rows: int, n: int, k: int, groups: int, like: Tensor) -> None:
        shape = (groups, n, k) if self._kernel == "wgrad" else (rows, n if self._kernel == "fprop" else k)
        if out.shape != shape or out.device != like.device:
            raise ValueError(
                f"out has shape {list(out.shape)} on {out.device}; give {list(shape)} on {like.device}, in any strides"
            )

    def _same_dtype(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Operands of one dtype that holds both exactly: a recipe's output_dtype makes dy's another than w's."""
        dtype = torch.promote_types(left.dtype, right.dtype)
        if left.is_cuda and dtype is torch.float32:
            raise ValueError(
                f"{self.left} is {dtype_text(left.dtype)} and {self.right} {dtype_text(right.dtype)}; Hopper's "
                f"{self.gemm} takes two operands of one 16-bit dtype: leave out the recipe's output_dtype, "
                "or use torch-reference"
            )
        return left.to(dtype), right.to(dtype)
