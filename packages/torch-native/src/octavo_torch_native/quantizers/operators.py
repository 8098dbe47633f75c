"""The custom operators `octavo_torch_native::*`: octavo_native's calls as functions of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import octavo_native
from octavo import check_group_sizes
from octavo.quantizer import Direction
from octavo_native import layouts as native_layouts
from octavo_torch.plugin_api import Operators, check_not_captured, plain_layout, status_word
from octavo_torch_native.arrays.launch import address, submit
from octavo_torch_native.quantizers.kernel import (
    DTYPE_NUMBERS,
    SCALE_DTYPE,
    Frame,
    Shape,
    codes_dtype,
    geometry,
    kernel_of,
    layout_number,
    plane_shapes,
    quantizer_of,
)

define = Operators("octavo_torch_native").define
"""Defines an operator of this package's namespace; one object, which lives as long as the operators."""

ROW_START = 16
"""Words of a plan before row_start[G + 1]: octavo/plan.h, ABI level 1."""


# ---- plan


def _plan(sizes: Tensor, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    groups, device = sizes.shape[0], like.device
    checked = sizes.is_cpu
    if checked:
        host = sizes.tolist()
        if sum(host) > rows or min(host, default=0) < 0:
            check_group_sizes(host, rows)
        if not like.is_cpu:
            check_not_captured("group_sizes", like)
            sizes = sizes.to(device, non_blocking=True)
    sizes = sizes.contiguous()
    words = torch.empty(octavo_native.plan_words(rows, groups), dtype=torch.int64, device=device)
    arguments = {
        "sizes": address(sizes),
        "sizes_are_64": sizes.dtype is torch.int64,
        "groups": groups,
        "rows": rows,
        "plan": words.data_ptr(),
    }
    if not checked:
        arguments["status"] = status_word(device).data_ptr()
    submit(octavo_native.plan, words, arguments, threaded=False)
    if checked:
        return words, sizes.to(torch.int64, copy=True)
    # torch.diff costs several times as much on the host
    starts = words[ROW_START : ROW_START + groups + 1]
    return words, starts[1:] - starts[:-1]


def _plan_fake(sizes: Tensor, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    words = native_layouts.plan_words(rows, sizes.shape[0])
    return like.new_empty((words,), dtype=torch.int64), like.new_empty(sizes.shape, dtype=torch.int64)


plan = define("plan(Tensor sizes, SymInt rows, Tensor like) -> (Tensor, Tensor)", _plan, _plan_fake)
"""The plan of `rows` rows on `like`'s device, and int64 sizes that fit into them: see rows.GroupIndex."""


# ---- quantize


def _quantize(x: Tensor, plan: Tensor | None, groups: int, work: str, *rest: Any) -> list[Tensor]:
    kernel = kernel_of(work)
    frame = kernel.frame(x, groups)
    device = x.device
    outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in frame.outputs]
    kernel.run(frame, outputs, x, plan, *rest)
    return outputs


def _quantize_fake(x: Tensor, plan: Tensor | None, groups: int, work: str, *_: Any) -> list[Tensor]:
    frame: Frame = kernel_of(work).frame(x, groups)
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in frame.outputs]


_INPUTS = "Tensor x, Tensor? plan, int groups, str work, Tensor? seed, SymInt group_offset, Tensor? scale"

quantize = define(
    f"quantize({_INPUTS}, Tensor? dy, Tensor? probs, Tensor? gamma, Tensor? beta) -> Tensor[]",
    _quantize,
    _quantize_fake,
)
"""The outputs of the Work of text `work`, in the order of its Kernel's fields and extras."""


def _quantize_into(
    x: Tensor,
    plan: Tensor | None,
    groups: int,
    work: str,
    seed: Tensor | None,
    group_offset: int,
    scale: Tensor | None,
    unchanged: Tensor | None,
    out: list[Tensor],
) -> None:
    kernel = kernel_of(work)
    kernel.run(kernel.frame(x, groups), out, x, plan, seed, group_offset, scale, unchanged=unchanged)


quantize_into = define(f"quantize_into({_INPUTS}, Tensor? unchanged, Tensor(a!)[] out) -> ()", _quantize_into)
"""The same without a prologue, into the caller's tensors, which stay as they are where int32 `unchanged` is not 0."""


# ---- dequantize, convert


def _dequantize(
    codes: Tensor,
    scale: Tensor,
    factor: Tensor | None,
    plan: Tensor | None,
    quantizer: str,
    shape: list[int],
    groups: int,
    direction: Direction,
    layout: str,
    dtype: torch.dtype,
) -> Tensor:
    plain = plain_layout(quantizer, tuple(shape), groups)
    out = torch.empty(plain.payload_shape(direction), dtype=dtype, device=codes.device)
    if plain.quantizer.shares_codes and layout == "plain":
        direction = "rowwise"
    codes, scale = codes.contiguous(), scale.contiguous()
    arguments: dict[str, Any] = {
        "direction": octavo_native.DIRECTIONS[direction],
        "codes": address(codes),
        "scales": address(scale),
        "global_": address(factor),
        "layout": layout_number(layout),
        "groups": groups,
        "plan": address(plan),
        "out": address(out),
        "out_dtype": DTYPE_NUMBERS[dtype],
        **geometry(plain.shape),
    }
    submit(quantizer_of(quantizer).dequantize, out, arguments)
    return out


def _dequantize_fake(
    codes: Tensor, scale: Any, factor: Any, plan: Any, quantizer: str, shape: Any, groups: int, *rest: Any
) -> Tensor:
    direction, _, dtype = rest
    plain = plain_layout(quantizer, tuple([int(size) for size in shape]), groups)
    return codes.new_empty(plain.payload_shape(direction), dtype=dtype)


dequantize = define(
    "dequantize(Tensor codes, Tensor scale, Tensor? factor, Tensor? plan, str quantizer, SymInt[] shape, int groups,"
    " str direction, str layout, ScalarType dtype) -> Tensor",
    _dequantize,
    _dequantize_fake,
)
"""Values of one plane in the logical shape; `quantizer` is a QuantizerSpec as JSON."""


def _converted_shapes(
    quantizer: str, shape: Any, groups: int, direction: Direction, to: str
) -> tuple[tuple[Shape, torch.dtype], tuple[Shape, torch.dtype]]:
    plain = plain_layout(quantizer, tuple([int(size) for size in shape]), groups)
    codes, scales = plane_shapes(plain, direction, to)
    return (codes, codes_dtype(plain.quantizer)), (scales, SCALE_DTYPE[plain.quantizer.scale_format])


def _convert(
    codes: Tensor,
    scale: Tensor,
    plan: Tensor | None,
    quantizer: str,
    shape: list[int],
    groups: int,
    direction: Direction,
    to: str,
) -> tuple[Tensor, Tensor]:
    made = _converted_shapes(quantizer, shape, groups, direction, to)
    into_codes, into_scale = (torch.empty(size, dtype=dtype, device=codes.device) for size, dtype in made)
    codes, scale = codes.contiguous(), scale.contiguous()
    arguments: dict[str, Any] = {
        "direction": octavo_native.DIRECTIONS[direction],
        "to": layout_number(to),
        "codes": address(codes),
        "scales": address(scale),
        "into_codes": address(into_codes),
        "into_scales": address(into_scale),
        "groups": groups,
        "plan": address(plan),
        **geometry(tuple(shape)),
    }
    submit(quantizer_of(quantizer).convert, codes, arguments)
    return into_codes, into_scale


def _convert_fake(codes: Tensor, scale: Tensor, plan: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    first, second = (codes.new_empty(size, dtype=dtype) for size, dtype in _converted_shapes(*rest))
    return first, second


convert = define(
    "convert(Tensor codes, Tensor scale, Tensor? plan, str quantizer, SymInt[] shape, int groups, str direction,"
    " str to) -> (Tensor, Tensor)",
    _convert,
    _convert_fake,
)
"""Codes and scales of one plane, from the plain layout to the native one, or back."""
