"""ReferenceBackend: binds requests to the functions of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.quantizer import HADAMARD_SIZE, Direction
from octavo_registry.contract.backend import AnyBound, AnyBoundGemm, Backend, Refused
from octavo_registry.contract.gemm import BoundDgrad, BoundFprop, BoundWgrad, Dgrad, Fprop, Wgrad, token_operands
from octavo_registry.contract.moves import TokenRows
from octavo_registry.contract.quantize import BoundDequantize, BoundQuantize, Dequantize, Quantize, QuantizeTokens
from octavo_registry.contract.request import AnyRequest, DequantizeRequest, GemmRequest, QuantizeRequest
from octavo_torch.arithmetic import operators
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.moe.rows import operators as move_operators
from octavo_torch.scaling.seeds import seed_tensor

_Operand = GroupedTensor | Tensor | TokenRows[Tensor]
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ReferenceBackend(Backend):
    """Serves everything that its card admits."""

    def refuses(self, request: AnyRequest) -> str | None:
        """None, but for a CUDA request in a process whose torch sees no CUDA device."""
        if request.device == "cuda" and not torch.cuda.is_available():
            return "device is cuda and this torch sees no CUDA device; install a CUDA build of torch or use the CPU"
        return None

    def bind(self, request: AnyRequest) -> AnyBound:
        """The function for `request.op`."""
        if isinstance(request, GemmRequest):
            return _gemm(request)
        if isinstance(request, QuantizeRequest):
            text = operators.quantizer_text(request.quantizer)
            quantize = _quantizer(text, request.quantizer.role)
            return BoundQuantize(quantize, of_tokens=_token_quantizer(quantize))
        if isinstance(request, DequantizeRequest):
            return BoundDequantize(_dequantizer(_DTYPES[request.out_dtype]))
        raise Refused(f"serves no {request.op}; its card does not name it")


def _gemm(request: GemmRequest) -> AnyBoundGemm:
    dtype = _DTYPES[request.out_dtype]
    if request.op == "fprop":
        return BoundFprop(_fprop(dtype), takes_tokens=token_operands(request, "x"))
    if request.op == "dgrad":
        return BoundDgrad(_dgrad(dtype), takes_tokens=token_operands(request, "dy"))
    return BoundWgrad(_wgrad(dtype), takes_tokens=token_operands(request, "x", "dy"))


def _quantizer(quantizer: str, role: str) -> Quantize[Tensor, GroupedTensor]:
    def quantize(
        x: Tensor,
        group_sizes: Tensor | None = None,
        *,
        seed: Tensor | int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Tensor | None = None,
    ) -> GroupedTensor:
        sizes = None if group_sizes is None else operators.bound_sizes(group_sizes, x.shape[0], x)
        if sizes is None and x.dim() == 2:
            sizes = torch.full((1,), x.shape[0], dtype=torch.int64, device=x.device)
        key = seed_tensor(seed, x.device)
        planes = operators.quantize_planes(x, sizes, quantizer, key, operand or role, group_offset, scale)
        return operators.assembled(operators.layout_of(x, sizes, quantizer), sizes, planes)

    return quantize


def _token_quantizer(quantize: Quantize[Tensor, GroupedTensor]) -> QuantizeTokens[Tensor, GroupedTensor]:
    def quantize_tokens(
        x: Tensor,
        group_sizes: Tensor,
        order: Tensor,
        position: Tensor,
        routed: Tensor,
        *,
        amax: bool = False,
        **how: Any,
    ) -> tuple[GroupedTensor, Tensor | None]:
        rows = move_operators.permute_rows(x, order, position, routed, None)
        return quantize(rows, group_sizes, **how), operators.group_amax_of(rows, group_sizes) if amax else None

    return quantize_tokens


def dequantize(q: GroupedTensor, direction: Direction = "rowwise") -> Tensor:
    """fp32 values of one plane."""
    codes, scale, factor = q.plane(direction)
    layout = q.spec
    text = operators.quantizer_text(layout.quantizer)
    sizes = None if q.group_sizes is None else operators.bound_sizes(q.group_sizes, layout.shape[0], codes)
    value: Tensor = operators.dequantize_plane(
        codes, scale, factor, sizes, text, list(layout.shape), layout.groups, direction
    )
    return value


def _dequantizer(dtype: torch.dtype) -> Dequantize[GroupedTensor, Tensor]:
    def run(q: GroupedTensor, direction: Direction = "rowwise") -> Tensor:
        return dequantize(q, direction).to(dtype)

    return run


def _operand(value: _Operand, direction: Direction) -> Tensor:
    if isinstance(value, TokenRows):
        tokens = dequantize(value.tokens)[0] if isinstance(value.tokens, GroupedTensor) else value.tokens
        rows: Tensor = move_operators.permute_rows(tokens, *value[1:], None)
        return rows
    return dequantize(value, direction) if isinstance(value, GroupedTensor) else value


def _row_sizes(rows: _Operand, group_sizes: Tensor) -> Tensor:
    """Bounded sizes of the ragged operand. A quantized one may come from another backend, which has bounded nothing."""
    if isinstance(rows, TokenRows):
        return operators.bound_sizes(group_sizes, rows.order.shape[0], rows.order)
    if isinstance(rows, Tensor):
        return operators.bound_sizes(group_sizes, rows.shape[0], rows)
    plane = rows.columnwise if rows.rowwise is None else rows.rowwise
    assert plane is not None  # a GroupedTensor has one
    sizes = group_sizes if rows.group_sizes is None else rows.group_sizes
    return operators.bound_sizes(sizes, rows.shape[0], plane)


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def _result_dtype(out: Tensor | None, dtype: torch.dtype) -> torch.dtype:
    return dtype if out is None else out.dtype


def _fprop(dtype: torch.dtype) -> Fprop[Tensor, _Operand]:
    def fprop(
        x: _Operand,
        w: _Operand,
        group_sizes: Tensor,
        *,
        bias: Tensor | None = None,
        bias_scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        sizes = _row_sizes(x, group_sizes)
        rows, matrices = _operand(x, "rowwise"), _operand(w, "rowwise")
        return _into(out, operators.fprop(rows, matrices, sizes, bias, bias_scales, _result_dtype(out, dtype)))

    return fprop


def _dgrad(dtype: torch.dtype) -> Dgrad[Tensor, _Operand]:
    def dgrad(dy: _Operand, w: _Operand, group_sizes: Tensor, *, out: Tensor | None = None) -> Tensor:
        sizes = _row_sizes(dy, group_sizes)
        rows, matrices = _operand(dy, "rowwise"), _operand(w, "columnwise")
        return _into(out, operators.dgrad(rows, matrices, sizes, _result_dtype(out, dtype)))

    return dgrad


def _wgrad(dtype: torch.dtype) -> Wgrad[Tensor, _Operand]:
    def wgrad(
        x: _Operand,
        dy: _Operand,
        group_sizes: Tensor,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        sizes = _row_sizes(x, group_sizes)
        left, right = _operand(x, "columnwise"), _operand(dy, "columnwise")
        # Hadamard column data have each group padded to 16 rows, which take part in the product
        if isinstance(x, GroupedTensor) and x.spec.quantizer.hadamard:
            product_sizes = (sizes + (HADAMARD_SIZE - 1)) // HADAMARD_SIZE * HADAMARD_SIZE
        else:
            product_sizes = sizes
        if out is None or not accumulate:
            return _into(out, operators.wgrad(left, right, product_sizes, _result_dtype(out, dtype)))
        added = out.float() + operators.wgrad(left, right, product_sizes, torch.float32)
        # the accumulator of a group without rows keeps its bits, a negative zero and a NaN included
        return out.copy_(torch.where((sizes > 0)[:, None, None], added.to(out.dtype), out))

    return wgrad
