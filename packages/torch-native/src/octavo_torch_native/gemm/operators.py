"""The custom operators `octavo_torch_native::gemm` and `gemm_into`: octavo_native's GEMMs as functions of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo_torch_native.arrays.operators import define
from octavo_torch_native.gemm.launches import GemmOperands, gemm_launch_of

_INPUTS = (
    "Tensor left, Tensor? left_scales, Tensor? left_global, Tensor right, Tensor? right_scales, Tensor? right_global,"
    " Tensor plan, Tensor? bias, Tensor? bias_scales, Tensor? order, SymInt each, str spec, SymInt rows, SymInt n,"
    " SymInt k, int groups"
)


def _gemm(left: Tensor, *rest: Any) -> Tensor:
    *operands, spec, rows, n, k, groups = rest
    launch = gemm_launch_of(spec)
    shapes = launch.shapes(rows, n, k, groups, left.is_cuda)
    out = torch.empty(shapes.out, dtype=launch.dtype, device=left.device)
    launch.run(shapes, out, (0, 0), GemmOperands(left, *operands))
    return out


def _gemm_fake(left: Tensor, *rest: Any) -> Tensor:
    *_, spec, rows, n, k, groups = rest
    launch = gemm_launch_of(spec)
    return left.new_empty(launch.out_shape(rows, n, k, groups), dtype=launch.dtype)


gemm = define(f"gemm({_INPUTS}) -> Tensor", _gemm, _gemm_fake)
"""The result of the GemmSpec of text `spec`; operands are codes and scales in native layouts, or unquantized."""


def _gemm_into(left: Tensor, *rest: Any) -> None:
    *operands, spec, rows, n, k, groups, out = rest
    launch = gemm_launch_of(spec)
    launch.run_into(launch.shapes(rows, n, k, groups, left.is_cuda), out, GemmOperands(left, *operands))


gemm_into = define(f"gemm_into({_INPUTS}, Tensor(a!) out) -> ()", _gemm_into)
"""The same into `out`, of any strides; added to it where the spec says so."""
