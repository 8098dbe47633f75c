"""The custom operators `gemm` and `gemm_into`: grouped GEMMs as functions of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo_torch.plugin_api import DTYPES
from octavo_torch_triton.arrays.row_index import define
from octavo_torch_triton.gemm.launches import columns_by_columns, rows_by_matrices
from octavo_torch_triton.gemm.operands import Bias, Planes
from octavo_triton.products.spec import GemmSpec, spec_from

_INPUTS = (
    "Tensor left, Tensor? left_scale, Tensor? left_factor, Tensor right, Tensor? right_scale, Tensor? right_factor,"
    " Tensor table, Tensor? bias, Tensor? bias_scales, str spec, SymInt[] shape"
)


def _gemm_into(left: Tensor, *rest: Any) -> None:
    left_scale, left_factor, right, right_scale, right_factor, table, bias, bias_scales, text, _, out = rest
    spec = spec_from(text)
    operands = Planes(left, left_scale, left_factor), Planes(right, right_scale, right_factor)
    if spec.gemm == "wgrad":
        columns_by_columns(spec, *operands, table, out)
    else:
        scales = None if bias_scales is None else bias_scales.to(torch.float32)
        rows_by_matrices(spec, *operands, table, Bias(bias, scales), out)


def _gemm(left: Tensor, *rest: Any) -> Tensor:
    *_, text, shape = rest
    out = torch.empty(shape, dtype=_dtype(spec_from(text)), device=left.device)
    _gemm_into(left, *rest, out)
    return out


def _gemm_fake(left: Tensor, *rest: Any) -> Tensor:
    *_, text, shape = rest
    return left.new_empty(shape, dtype=_dtype(spec_from(text)))


def _dtype(spec: GemmSpec) -> torch.dtype:
    return DTYPES[spec.out_dtype]


gemm = define(f"gemm({_INPUTS}) -> Tensor", _gemm, _gemm_fake)
"""The result, `shape`, of the GemmSpec of text `spec`."""

gemm_into = define(f"gemm_into({_INPUTS}, Tensor(a!) out) -> ()", _gemm_into)
"""The same into `out`, of any strides; added to it where the spec says so."""
