"""The custom operators that quantize, dequantize, convert and expand MXFP4: octavo_native's calls on tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import octavo_native
from octavo.quantizer import Direction
from octavo_torch.plugin_api import PAYLOAD_DTYPE, SCALE_DTYPE, plain_layout
from octavo_torch_native.arrays.launch import address, submit
from octavo_torch_native.arrays.operators import define
from octavo_torch_native.quantizers.inputs import QuantizeInputs
from octavo_torch_native.quantizers.launches import QuantizeLaunch, launch_of
from octavo_torch_native.quantizers.planes import (
    DTYPE_NUMBERS,
    Shape,
    geometry,
    layout_number,
    plane_shapes,
    quantizer_of,
)
from octavo_torch_native.quantizers.shapes import QuantizeShapes


def _quantize(x: Tensor, plan: Tensor | None, groups: int, spec: str, *rest: Any) -> list[Tensor]:
    return _outputs(spec, groups, QuantizeInputs(x, plan, *rest))


def _outputs(spec: str, groups: int, inputs: QuantizeInputs) -> list[Tensor]:
    x, order = inputs.x, inputs.order
    launch = launch_of(spec)
    return _launched(launch, launch.shapes(x, groups, None if order is None else order.shape[0]), inputs)


def _launched(launch: QuantizeLaunch, shapes: QuantizeShapes, inputs: QuantizeInputs) -> list[Tensor]:
    device = inputs.x.device
    outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes.outputs]
    launch.run(shapes, outputs, inputs)
    return outputs


def _fake(like: Tensor, shapes: QuantizeShapes) -> list[Tensor]:
    return [like.new_empty(shape, dtype=dtype) for shape, dtype in shapes.outputs]


def _quantize_fake(x: Tensor, plan: Tensor | None, groups: int, spec: str, *_: Any) -> list[Tensor]:
    return _fake(x, launch_of(spec).shapes(x, groups))


_INPUTS = "Tensor x, Tensor? plan, int groups, str spec, Tensor? seed, SymInt group_offset, Tensor? scale"

quantize = define(
    f"quantize({_INPUTS}, Tensor? dy, Tensor? probs, Tensor? gamma, Tensor? beta) -> Tensor[]",
    _quantize,
    _quantize_fake,
)
"""The outputs of the LaunchSpec of text `spec`, in the order of its QuantizeLaunch's fields and extras."""


def _quantize_tokens(x: Tensor, plan: Tensor | None, groups: int, spec: str, *rest: Any) -> list[Tensor]:
    seed, group_offset, scale, order, each = rest
    return _outputs(spec, groups, QuantizeInputs(x, plan, seed, group_offset, scale, order=order, each=each))


def _quantize_tokens_fake(x: Tensor, plan: Tensor | None, groups: int, spec: str, *rest: Any) -> list[Tensor]:
    return _fake(x, launch_of(spec).shapes(x, groups, rest[3].shape[0]))


quantize_tokens = define(
    f"quantize_tokens({_INPUTS}, Tensor order, SymInt each) -> Tensor[]", _quantize_tokens, _quantize_tokens_fake
)
"""The same without a prologue, of the rows that the choices `order`, `each` of a token, make of tokens x."""


def _quantize_into(x: Tensor, plan: Tensor | None, groups: int, spec: str, *rest: Any) -> None:
    seed, group_offset, scale, unchanged, out = rest
    launch = launch_of(spec)
    inputs = QuantizeInputs(x, plan, seed, group_offset, scale, unchanged=unchanged)
    launch.run(launch.shapes(x, groups), out, inputs)


quantize_into = define(f"quantize_into({_INPUTS}, Tensor? unchanged, Tensor(a!)[] out) -> ()", _quantize_into)
"""The same without a prologue, into the caller's tensors, which stay as they are where int32 `unchanged` is not 0."""


# ---- dequantize, convert


def _dequantize(codes: Tensor, scale: Tensor, factor: Tensor | None, plan: Tensor | None, *rest: Any) -> Tensor:
    quantizer, shape, groups, direction, layout, dtype = rest
    plain = plain_layout(quantizer, tuple(shape), groups)
    out = torch.empty(plain.payload_shape(direction), dtype=dtype, device=codes.device)
    if plain.quantizer.shares_codes and layout == "plain":
        direction = "rowwise"
    codes, scale = codes.contiguous(), scale.contiguous()
    factor = None if factor is None else factor.contiguous()
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
    return (codes, PAYLOAD_DTYPE[plain.quantizer.format]), (scales, SCALE_DTYPE[plain.quantizer.scale_format])


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
    planes = _converted_shapes(quantizer, shape, groups, direction, to)
    into_codes, into_scale = (torch.empty(size, dtype=dtype, device=codes.device) for size, dtype in planes)
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
    submit(quantizer_of(quantizer).convert, codes, arguments, recordable=False)
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


# ---- MXFP4


def _words(blocks: Tensor) -> Tensor:
    """`blocks`, or a copy of them that can be read eight codes at a time."""
    blocks = blocks.contiguous()
    return blocks.clone() if blocks.data_ptr() % 4 else blocks


def _mxfp4_shapes(launch: QuantizeLaunch, blocks: Tensor) -> QuantizeShapes:
    groups, rows, half = map(int, blocks.shape)
    return launch.shapes_of((groups, rows, 2 * half), groups, torch.bfloat16, cuda=True)


def _quantize_mxfp4(blocks: Tensor, scales: Tensor, spec: str, only: Direction | None) -> list[Tensor]:
    launch = launch_of(spec)
    inputs = QuantizeInputs(_words(blocks), None, None, 0, None, mxfp4=scales, only=only)
    return _launched(launch, _mxfp4_shapes(launch, blocks), inputs)


def _quantize_mxfp4_fake(blocks: Tensor, scales: Tensor, spec: str, only: Direction | None) -> list[Tensor]:
    return _fake(blocks, _mxfp4_shapes(launch_of(spec), blocks))


quantize_mxfp4 = define(
    "quantize_mxfp4(Tensor blocks, Tensor scales, str spec, str? only) -> Tensor[]",
    _quantize_mxfp4,
    _quantize_mxfp4_fake,
)
"""`quantize` of matrices [G, N, K] that are MXFP4 on a GPU, from their bytes, for E4M3 codes in square blocks.

only   the one direction whose plane is written, the other's memory being left as it is; None: all of the spec
"""


def _mxfp4_values(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty((*blocks.shape[:-1], 2 * blocks.shape[-1]), dtype=dtype, device=blocks.device)
    blocks, scales = _words(blocks), scales.contiguous()
    arguments: dict[str, Any] = {
        "codes": address(blocks),
        "scales": address(scales),
        "blocks": scales.numel(),
        "out": address(out),
        "out_dtype": DTYPE_NUMBERS[dtype],
    }
    submit(octavo_native.expand_mxfp4, out, arguments, threaded=False, recordable=False)
    return out


mxfp4_values = define(
    "mxfp4_values(Tensor blocks, Tensor scales, ScalarType dtype) -> Tensor",
    _mxfp4_values,
    lambda blocks, scales, dtype: blocks.new_empty((*blocks.shape[:-1], 2 * blocks.shape[-1]), dtype=dtype),
)
"""Values [..., K] of packed E2M1 [..., K / 2] and E8M0 [..., K / 32], each a product in fp32, rounded once."""
