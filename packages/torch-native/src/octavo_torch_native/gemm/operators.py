"""The custom operators `octavo_torch_native::gemm` and `gemm_into`: octavo_native's GEMMs as functions of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo_torch_native.gemm.product import multiplier_of
from octavo_torch_native.quantizers.operators import define

_INPUTS = (
    "Tensor left, Tensor? left_scales, Tensor? left_global, Tensor right, Tensor? right_scales, Tensor? right_global,"
    " Tensor plan, Tensor? bias, Tensor? bias_scales, str product, SymInt rows, SymInt n, SymInt k, int groups"
)


def _gemm(left: Tensor, *rest: Any) -> Tensor:
    *operands, product, rows, n, k, groups = rest
    multiplier = multiplier_of(product)
    frame = multiplier.frame(rows, n, k, groups, left.is_cuda)
    out = torch.empty(frame.shape, dtype=multiplier.dtype, device=left.device)
    multiplier.run(frame, out, (0, 0), left, *operands)
    return out


def _gemm_fake(left: Tensor, *rest: Any) -> Tensor:
    *_, product, rows, n, k, groups = rest
    multiplier = multiplier_of(product)
    return left.new_empty(multiplier.shape(rows, n, k, groups), dtype=multiplier.dtype)


gemm = define(f"gemm({_INPUTS}) -> Tensor", _gemm, _gemm_fake)
"""The result of the Product of text `product`; native codes and scales of both operands, or both as they are."""


def _gemm_into(left: Tensor, *rest: Any) -> None:
    *operands, product, rows, n, k, groups, out = rest
    multiplier = multiplier_of(product)
    multiplier.run_into(multiplier.frame(rows, n, k, groups, left.is_cuda), out, left, *operands)


gemm_into = define(f"gemm_into({_INPUTS}, Tensor(a!) out) -> ()", _gemm_into)
"""The same into `out`, of any strides; added to it where the product says so."""
