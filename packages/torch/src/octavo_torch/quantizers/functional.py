"""The public functions quantize, dequantize, convert_layout and group_amax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo_torch.arithmetic import operators
from octavo_torch.arrays.checks import BackendNames, backend_names, brief
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.grouped_tensor import PLANES, GroupedTensor
from octavo_torch.arrays.sizes import GroupSizes, all_rows, as_sizes
from octavo_torch.compiler.transforms import GROUPS, Subject, without_derivative
from octavo_torch.quantizers import arguments
from octavo_torch.quantizers.plans import converter_plan, dequantizer_plan, quantizer_plan
from octavo_torch.quantizers.writing import quantize_into

Layouts = tuple[str, str]

PLAIN_LAYOUTS: Layouts = (PLAIN, PLAIN)
_AMAX_SPEC = QuantizerSpec(scaling="current", format="e4m3", orientation="rowwise")


@without_derivative(Subject("quantize", GROUPS))
def quantize(
    x: Tensor,
    spec: QuantizerSpec,
    group_sizes: GroupSizes | None = None,
    *,
    layouts: Layouts = PLAIN_LAYOUTS,
    seed: int | Tensor | None = None,
    operand: str | None = None,
    group_offset: int = 0,
    scale: Tensor | None = None,
    out: GroupedTensor | None = None,
    unchanged: Tensor | None = None,
    backend: BackendNames = None,
) -> GroupedTensor:
    """Codes and decode scales of `x`, in the directions that `spec` asks for.

    x             [M, K] rows in group order, or [G, N, K] stacked matrices; bf16, fp16 or fp32
    group_sizes   [G] integers on the host or on x's device, sum <= M; None: one group of M rows. Not with matrices
    layouts       of the rowwise and of the columnwise plane: "plain", or names of a backend's own, see `octavo why`
    seed          integer or integer scalar tensor, modulo 2^64; needed by stochastic rounding
    operand       "x", "w" or "dy": part of the random bits' position; None: the spec's role
    group_offset  number of the first group, likewise
    scale         [G] fp32 encode scales, needed by delayed scaling
    out           what an earlier call for an operand of this shape returned: its tensors are written, and returned
    unchanged     int32 [1] on x's device: where it is not 0, `out` is left as it is. It is not read back, so that a
                  captured graph may hold the call
    backend       a name or a closed list of names

    Not differentiable. Rows past the sum are not read. Raises ValueError for arguments that do not fit,
    NoBackendError where no installed backend serves the request.
    """
    arguments.check_quantize(x, spec, group_sizes, seed, scale)
    named = arguments.operand_name(operand) or spec.role
    arguments.check_unchanged(unchanged, out, x)
    layouts = arguments.layout_names(layouts)
    sizes, at_host = sizes_of(x, group_sizes)
    groups = x.shape[0] if sizes is None else sizes.shape[0]
    arguments.check_group_offset(group_offset, groups)
    arguments.check_scale(scale, groups, x)
    plan = quantizer_plan(spec, x, x.shape[-1], groups, at_host, backend_names(backend), layouts)
    how: dict[str, Any] = {"seed": seed, "operand": named, "group_offset": group_offset, "scale": scale}
    if out is None:
        result: GroupedTensor = plan.run(x, sizes, **how)
        return result
    if not isinstance(out, GroupedTensor):
        raise ValueError(f"out is a {type(out).__name__}; give the GroupedTensor that an earlier call returned")
    quantize_into(plan, x, sizes, out, unchanged, how)
    return out


def sizes_of(x: Tensor, group_sizes: GroupSizes | None) -> tuple[Tensor | None, bool]:
    """Sizes as backends take them, None for matrices, and whether they are in host memory."""
    if x.dim() == 3:
        return None, x.is_cpu
    return as_sizes(all_rows(x) if group_sizes is None else group_sizes, x.shape[0], None, x)


@without_derivative(Subject("dequantize", GROUPS))
def dequantize(
    q: GroupedTensor,
    direction: Literal["rowwise", "columnwise"] = "rowwise",
    *,
    dtype: torch.dtype = torch.float32,
    backend: BackendNames = None,
) -> Tensor:
    """Values of one direction in the logical shape, rounded once to `dtype`; rows past the sum are +0.

    q         in any layouts that an installed backend reads
    dtype     torch.float32, in which values are exact, torch.bfloat16 or torch.float16
    backend   a name or a closed list of names

    Hadamard column data come back in the Hadamard domain, [block_bound(M, G, 16) * 16, K]. Raises ValueError for
    arguments that do not fit, NoBackendError where no installed backend reads the layout.
    """
    arguments.check_quantized(q)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype is {brief(dtype)}; give torch.float32, torch.bfloat16 or torch.float16")
    named = arguments.direction_name(direction)
    plan = dequantizer_plan(q, named, DTYPE_NAMES[dtype], backend_names(backend))
    values: Tensor = plan.run(q, named)
    return values


@without_derivative(Subject("convert_layout", GROUPS))
def convert_layout(q: GroupedTensor, layouts: Layouts, *, backend: BackendNames = None) -> GroupedTensor:
    """`q` in other (rowwise, columnwise) layouts, bit for bit; planes that have theirs already are shared with `q`.

    layouts   "plain", or names of a backend's own, such as "rows" and "panels" of torch-native. The name of a plane
              that `q` does not have says nothing
    backend   a name or a closed list of names

    Raises ValueError for arguments that do not fit, NoBackendError where no installed backend has these layouts.
    """
    arguments.check_quantized(q)
    layouts = arguments.layout_names(layouts)
    spec, names = q.spec, backend_names(backend)
    now = (spec.rowwise_layout, spec.columnwise_layout)
    rowwise, columnwise = (
        layout if direction in spec.quantizer.directions else PLAIN
        for direction, layout in zip(("rowwise", "columnwise"), layouts, strict=True)
    )
    wanted = (rowwise, columnwise)
    if wanted == now:
        return q
    converted = q
    if now != PLAIN_LAYOUTS:
        plan = converter_plan(q, now, names)
        converted = _conversion(plan.backend, now, plan.bound.to_plain)(q)
    if wanted != PLAIN_LAYOUTS:
        plan = converter_plan(converted, wanted, names)
        converted = _conversion(plan.backend, wanted, plan.bound.from_plain)(converted)
    return _sharing(q, converted)


def _conversion(
    backend: str, layouts: Layouts, conversion: Callable[[GroupedTensor], GroupedTensor] | None
) -> Callable[[GroupedTensor], GroupedTensor]:
    if conversion is None:
        raise ValueError(
            f"{backend} makes layouts {' and '.join(layouts)} and converts no planes to them or back; quantize with "
            "these layouts instead"
        )
    return conversion


def _sharing(q: GroupedTensor, converted: GroupedTensor) -> GroupedTensor:
    """`converted`, with the planes of `q` in the direction whose layout has stayed."""
    kept: dict[str, Any] = {}
    before: GroupedTensorSpec = q.spec
    for direction in ("rowwise", "columnwise"):
        if getattr(before, f"{direction}_layout") == getattr(converted.spec, f"{direction}_layout"):
            kept |= {name: getattr(q, name) for name in PLANES if name.startswith(direction)}
    return replace(converted, **kept)


@without_derivative(Subject("group_amax", GROUPS))
def group_amax(x: Tensor, group_sizes: GroupSizes | None = None) -> Tensor:
    """fp32 [G]: max |x| of each group of [M, K] rows or of each of [G, N, K] matrices.

    NaN where a group holds one, 0 where it has no rows; rows past the sum are not read. `x` and `group_sizes` as in
    `quantize`.
    """
    arguments.check_quantize(x, _AMAX_SPEC, group_sizes, None, None)
    amax: Tensor = operators.group_amax_of(x, sizes_of(x, group_sizes)[0])
    return amax
