"""What a MoE layer keeps for its backward: its forms, and fc1's result as codes, which the lean one keeps."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from octavo import GroupedTensorSpec
from octavo.errors import one_of
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import KEPT_ROWS
from octavo_registry.contract.quantize import Dequantize
from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_torch.arithmetic.casts import to_fp16
from octavo_torch.arrays.checks import BackendNames
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.sizes import Sizes
from octavo_torch.quantizers.plans import dequantizer_plan, quantizer_plan

Form = Literal["keep_all", "standard", "lean", "recompute"]
WeightCodes = Literal["keep", "remake"]

FORMS: tuple[Form, ...] = get_args(Form)
_WEIGHT_CODES: tuple[WeightCodes, ...] = get_args(WeightCodes)


def check_form(form: object) -> Form:
    """`form`; ValueError unless it is one of FORMS."""
    return one_of("form", form, FORMS)


def check_weight_codes(weight_codes: object) -> WeightCodes:
    """`weight_codes`; ValueError unless it is "keep" or "remake"."""
    return one_of("weight_codes", weight_codes, _WEIGHT_CODES)


class RowReader(NamedTuple):
    """How kept codes of rows are read, and by which backend."""

    spec: GroupedTensorSpec
    dequantize: Dequantize[GroupedTensor, Tensor]
    backend: str

    def rows(self, codes: Tensor, scales: Tensor, group_sizes: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows that the codes stand for, rounded once to `dtype`; +0 past the sum of the sizes."""
        rows = self.dequantize(GroupedTensor(self.spec, group_sizes, codes, scales), "rowwise")
        return to_fp16(rows) if dtype is torch.float16 else rows


class RowCodes(NamedTuple):
    """Rows as octavo_numerics.keep_rows defines it: codes float8_e4m3fn [M, N], scales fp32 [M, ceil(N / 128)]."""

    codes: Tensor
    scales: Tensor
    reader: RowReader


def rows_plan(like: Tensor, columns: int, groups: int, backend: BackendNames) -> QuantizePlan:
    """The plan that quantizes rows of `columns` values, in `like`'s dtype and on its device."""
    return quantizer_plan(KEPT_ROWS, like, columns, groups, like.device.type == "cpu", backend, (PLAIN, PLAIN))


def keep_rows(plan: QuantizePlan, rows: Tensor, sizes: Sizes, backend: BackendNames) -> RowCodes:
    """`rows` as codes, and their reader, which is chosen now because backward's thread does not see a preference."""
    q: GroupedTensor = plan.run(rows, sizes)
    name: DType = "float32" if rows.dtype is torch.float16 else DTYPE_NAMES[rows.dtype]
    codes, scales, _ = q.plane("rowwise")
    dequantizer = dequantizer_plan(q, "rowwise", name, backend)
    return RowCodes(codes, scales, RowReader(q.spec, dequantizer.run, dequantizer.backend))
