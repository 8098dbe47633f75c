"""GemmLaunch: the launches of one GemmSpec, and what their shapes decide."""

from __future__ import annotations

import atexit
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import octavo_native
from octavo_native.gemms import gemm_named
from octavo_torch.plugin_api import DTYPES, Bounded
from octavo_torch_native.arrays.launch import address, aligned_rows, submit, workspace, writable_strides
from octavo_torch_native.gemm.spec import GemmSpec, gemm_from, native_gemm
from octavo_torch_native.quantizers.planes import DTYPE_NUMBERS, Shape


class GemmShapes:
    """What launches on operands of one shape need.

    out         the shape of the result
    constants   octavo_native's arguments that follow from the shapes
    workspace   bytes of scratch
    """

    __slots__ = ("constants", "out", "workspace")

    def __init__(self, out: Shape, constants: dict[str, Any], workspace: int) -> None:
        self.out, self.constants, self.workspace = out, constants, workspace


class GemmOperands(NamedTuple):
    """What a launch reads: the operators' arguments of these names; None where there is none.

    plan         the words of a GroupIndex
    order, each  where the spec says that an operand is tokens [T, K], or their codes, whose rows are gathered: int64
                 [M], the choice of each row, and the number of choices per token
    """

    left: Tensor
    left_scales: Tensor | None
    left_global: Tensor | None
    right: Tensor
    right_scales: Tensor | None
    right_global: Tensor | None
    plan: Tensor
    bias: Tensor | None
    bias_scales: Tensor | None
    order: Tensor | None = None
    each: int = 1


class GemmLaunch:
    """The launches of one GemmSpec."""

    def __init__(self, spec: GemmSpec) -> None:
        self.dtype = DTYPES[spec.out_dtype]
        self.accumulate = spec.accumulate
        self._gemm = spec.gemm
        self.quantized = spec.scaling is not None
        self._ctas, self._tokens = spec.ctas, spec.tokens
        self._native = native_gemm(spec)
        self._shapes: Bounded[tuple[int, int, int, int, bool], GemmShapes] = Bounded()

    def out_shape(self, rows: int, n: int, k: int, groups: int) -> Shape:
        """The result's: y [M, N], dx [M, K] or dw [G, N, K]."""
        if self._gemm == "wgrad":
            return (groups, n, k)
        return (rows, n if self._gemm == "fprop" else k)

    def shapes(self, rows: int, n: int, k: int, groups: int, cuda: bool) -> GemmShapes:
        """The shapes for operands of these sides, remembered: computing them takes longer than a launch."""
        key = (rows, n, k, groups, cuda)
        shapes = self._shapes.get(key)
        if shapes is None:
            sides = {"rows": rows, "n": n, "k": k, "groups": groups}
            size = self._native.workspace_bytes(cuda=cuda, **sides)
            sides["workspace_bytes"], sides["ctas"] = size, self._ctas
            shapes = self._shapes[key] = GemmShapes(self.out_shape(rows, n, k, groups), sides, size)
        return shapes

    def run_into(self, shapes: GemmShapes, out: Tensor, operands: GemmOperands) -> None:
        """`run` for the caller's `out`, of any strides."""
        strides = writable_strides(out)
        if strides is not None:
            self.run(shapes, out, strides, operands)
            return
        # the kernels cannot write these strides: a copy takes the result, and holds out's values where it is added to
        copy = out.contiguous() if self.accumulate else torch.empty(shapes.out, dtype=out.dtype, device=out.device)
        self.run(shapes, copy, (0, 0), operands)
        out.copy_(copy)

    def run(self, shapes: GemmShapes, out: Tensor, strides: tuple[int, int], operands: GemmOperands) -> None:
        """Write `out`, whose dtype is the spec's.

        strides   of its rows and of its matrices, in elements; 0: it is contiguous
        """
        if not out.numel():
            return
        left, left_scales, left_global, right, right_scales, right_global, plan, bias, bias_scales, order, each = (
            operands
        )
        arguments = shapes.constants.copy()
        arguments["out"], arguments["plan"] = out.data_ptr(), plan.data_ptr()
        arguments["out_row_stride"], arguments["out_group_stride"] = strides
        if self.quantized:
            left, right = left.contiguous(), right.contiguous()
            # None beside values
            left_scales, right_scales = (
                None if scales is None else scales.contiguous() for scales in (left_scales, right_scales)
            )
            arguments["left_scales"], arguments["right_scales"] = address(left_scales), address(right_scales)
            if left_global is not None and right_global is not None:
                left_global, right_global = left_global.contiguous(), right_global.contiguous()
                arguments["left_global"], arguments["right_global"] = address(left_global), address(right_global)
        else:
            left, arguments["left_stride"] = aligned_rows(left)
            right, arguments["right_stride"] = aligned_rows(right)
        if order is not None:
            order = order.contiguous()
            arguments[f"{self._tokens}_index"], arguments["each"] = address(order), each
            arguments["count"] = (left if self._tokens == "left" else right).shape[-2]
        arguments["left"], arguments["right"] = address(left), address(right)
        if bias is not None:
            bias = bias.contiguous()
            arguments["bias"], arguments["bias_dtype"] = address(bias), DTYPE_NUMBERS[bias.dtype]
            if bias_scales is not None:
                bias_scales = bias_scales.to(torch.float32).contiguous()
                arguments["bias_scales"] = address(bias_scales)
        # alive until the launch: torch reuses memory in stream order, so afterwards it may go
        memory, arguments["workspace"] = workspace(shapes.workspace, out)
        submit(self._native.run, out, arguments)
        del memory

    def record(self, into: octavo_native.Sequence, shapes: GemmShapes, cuda: bool, **places: int) -> None:
        """Append the launch on contiguous arrays to `into`; `places` are theirs, by octavo_native's names."""
        self._native.run(cuda=cuda, into=into, **shapes.constants, **places)


@lru_cache(maxsize=1024)
def gemm_launch_of(text: str) -> GemmLaunch:
    """The launches of the GemmSpec of this text."""
    return GemmLaunch(gemm_from(text))


# torch keeps operators, and what they reach, past the end of the interpreter: nanobind would call it a leak
for _cache in (gemm_launch_of, gemm_named):
    atexit.register(_cache.cache_clear)
