"""QuantizeLaunch: the launches of one LaunchSpec, and the shapes of what they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

import octavo_native
from octavo import GroupedTensorSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction
from octavo_native import GATED, InputArgs, PlaneArgs, PrologueArgs
from octavo_native.layouts import VALUES, values_shape
from octavo_torch.plugin_api import PAYLOAD_DTYPE, SCALE_DTYPE, Bounded, GroupedTensor, is_plain
from octavo_torch_native.arrays.launch import address, aligned_rows, as_rows, in_pieces, submit, workspace
from octavo_torch_native.quantizers.inputs import QuantizeInputs
from octavo_torch_native.quantizers.planes import (
    DTYPE_NUMBERS,
    PREFIX,
    VALUE_DTYPE,
    Shape,
    geometry,
    layout_number,
    native_quantizer,
    native_shapes,
    plane_shapes,
)
from octavo_torch_native.quantizers.shapes import Output, QuantizeShapes
from octavo_torch_native.quantizers.spec import spec_from

_PROLOGUE_OUTPUTS = ("dprobs", "forward", "mean", "rstd")
_EXTRAS = ("amax", "dequantized", "activated", "dbias", "dprobs", "forward")

_VALUES = layout_number(VALUES)

_WORDS = {"": "_codes", "_scale": "_scales", "_global": "_global"}
"""How octavo_native's names of a plane's arrays end, by those of GroupedTensor's fields."""


def _plane(layout: int, addresses: Sequence[int]) -> PlaneArgs:
    """The plane of these arrays: codes, scales and, in NVFP4, the second level; or values and the second level."""
    codes, *rest = addresses
    scales = 0 if layout == _VALUES else rest.pop(0)
    return PlaneArgs(codes, scales, rest[0] if rest else 0, layout)


class QuantizeLaunch:
    """The launches of one LaunchSpec.

    text       the spec, as the operators take it
    fields     GroupedTensor's planes, each with the number of the output that holds it; shared codes have one output
    extras     names of the outputs after the planes
    arguments  octavo_native's names of all outputs
    """

    def __init__(self, text: str) -> None:
        spec = self.spec = spec_from(text)
        self.text, quantizer = text, spec.quantizer
        self.extras = [name for name in _EXTRAS if getattr(spec, name)]
        if spec.prologue == "norm":
            self.extras += ["mean", "rstd"] if spec.norm == "layer" else ["rstd"]
        self._native = native_quantizer(quantizer, spec.operand)
        self._is_interleaved = bool(spec.interleaved_cols or spec.interleaved_rows)
        self._layouts = dict(zip(PREFIX, spec.layouts, strict=True))
        self._shapes: Bounded[tuple[Any, ...], QuantizeShapes] = Bounded()
        directions = quantizer.directions if spec.planes else ()
        # plain shared codes and their scales are one array, whichever direction it is read in: the row data
        self._shared = quantizer.shares_codes and all(self._layouts[direction] == PLAIN for direction in directions)
        self._directions: tuple[Direction, ...] = ("rowwise",) if self._shared else directions
        # values have no scales beside them
        parts = {
            direction: [
                part
                for part in _WORDS
                if (part != "_global" or quantizer.scaling == "nvfp4")
                and (part != "_scale" or self._layouts[direction] != VALUES)
            ]
            for direction in self._directions
        }
        arrays = [(direction, part) for direction, own in parts.items() for part in own]
        self.fields: list[tuple[str, int]] = [
            (direction + part, number)
            for direction in directions
            for number, (written, part) in enumerate(arrays)
            if written == ("rowwise" if self._shared else direction)
        ]
        self.arguments = [PREFIX[direction] + _WORDS[part] for direction, part in arrays]
        self.arguments += self.extras
        self._planes = [
            (direction, layout_number(self._layouts[direction]), [PREFIX[direction] + _WORDS[part] for part in own])
            for direction, own in parts.items()
        ]
        self._prologue: dict[str, Any] = {
            "kind": octavo_native.PROLOGUES[spec.prologue],
            "activation": octavo_native.ACTIVATIONS[spec.activation],
            "norm": octavo_native.NORMS[spec.norm],
        }
        if spec.prologue == "norm":
            self._prologue["epsilon"] = spec.epsilon

    def shapes(self, x: Tensor, groups: int, rows: int | None = None) -> QuantizeShapes:
        """The shapes for inputs like `x` in this many groups, remembered: computing them takes longer than a launch.

        rows   of an operand that is read from tokens `x`; None: x's own
        """
        shape: Shape = x.shape if rows is None else (rows, x.shape[1])
        # sizes that a compiler traces are symbols, which are no keys
        if not is_plain(x):
            shape, groups = tuple([int(size) for size in shape]), int(groups)
        return self.shapes_of(shape, groups, x.dtype, x.is_cuda, 0 if rows is None else int(x.shape[0]))

    def shapes_of(self, shape: Shape, groups: int, dtype: torch.dtype, cuda: bool, tokens: int = 0) -> QuantizeShapes:
        """`new_shapes`, remembered."""
        key = (shape, groups, dtype, cuda, tokens)
        shapes = self._shapes.get(key)
        if shapes is None:
            shapes = self._shapes[key] = self.new_shapes(tuple(shape), groups, dtype, cuda, tokens)
        return shapes

    def new_shapes(self, shape: Shape, groups: int, dtype: torch.dtype, cuda: bool, tokens: int = 0) -> QuantizeShapes:
        """The shapes for inputs of this shape, [M, K] or [G, N, K], and dtype.

        tokens   T, where the rows [M, K] are read from tokens [T, K]; 0 where x has the rows themselves
        """
        spec, quantizer = self.spec, self.spec.quantizer
        quantized = (*shape[:-1], shape[-1] // 2) if spec.halves else shape
        row_layout, column_layout = (
            self._layouts[direction] if direction in quantizer.directions else PLAIN for direction in PREFIX
        )
        make_spec = partial(
            GroupedTensorSpec,
            shape=quantized,
            groups=groups,
            ragged_axis=0 if len(shape) == 2 else None,
            quantizer=quantizer,
            rowwise_layout=row_layout,
            columnwise_layout=column_layout,
        )
        outputs = [
            output
            for direction in self._directions
            for output in self._plane_outputs(direction, quantized, groups, make_spec)
        ]
        outputs += self._extra_outputs(shape, quantized, groups, dtype)
        constants = {"dtype": DTYPE_NUMBERS[dtype], "groups": groups, **geometry(shape)}
        size = self._workspace_bytes(constants, cuda, tokens)
        if self._is_interleaved:
            constants |= {"interleaved_cols": spec.interleaved_cols, "interleaved_rows": spec.interleaved_rows}
        return QuantizeShapes(make_spec, tuple(outputs), constants, size)

    def _plane_outputs(
        self, direction: Direction, quantized: Shape, groups: int, make_spec: Callable[[], GroupedTensorSpec]
    ) -> list[Output]:
        """Codes, scales and NVFP4's second level of one plane; values instead of codes and scales in that layout."""
        quantizer, layout = self.spec.quantizer, self._layouts[direction]
        if layout == VALUES:
            outputs = [(values_shape(direction=direction, groups=groups, **geometry(quantized)), VALUE_DTYPE)]
        else:
            if layout == PLAIN:
                codes, scales = plane_shapes(make_spec(), direction, layout)
            else:
                codes, scales = native_shapes(quantizer, quantized, groups, direction, layout)
            outputs = [(codes, PAYLOAD_DTYPE[quantizer.format]), (scales, SCALE_DTYPE[quantizer.scale_format])]
        if quantizer.scaling == "nvfp4":
            outputs.append(((groups,), torch.float32))
        return outputs

    def _extra_outputs(self, shape: Shape, quantized: Shape, groups: int, dtype: torch.dtype) -> list[Output]:
        """The outputs after the planes, in the order of `extras`."""
        extras: dict[str, Output] = {
            "amax": ((groups,), torch.float32),
            "dequantized": (quantized, torch.bfloat16),
            "activated": (quantized, dtype),
            "dbias": ((groups, quantized[-1]), torch.float32),
            "dprobs": (shape[:-1], torch.float32),
            "forward": ((*shape[:-1], shape[-1] // 2 if self.spec.activation in GATED else shape[-1]), dtype),
            "mean": (shape[:-1], torch.float32),
            "rstd": (shape[:-1], torch.float32),
        }
        return [extras[name] for name in self.extras]

    def _workspace_bytes(self, constants: dict[str, int], cuda: bool, tokens: int) -> int:
        spec, prologue = self.spec, self._prologue
        return self._native.workspace_bytes(
            cuda=cuda,
            rowwise="rowwise" in self._directions,
            columnwise="columnwise" in self._directions,
            amax=spec.amax,
            dequantized=spec.dequantized,
            dbias=spec.dbias,
            dprobs=spec.dprobs,
            prologue=prologue["kind"],
            activation=prologue["activation"],
            norm=prologue["norm"],
            count=tokens,
            **constants,
        )

    def run(self, shapes: QuantizeShapes, outputs: list[Tensor], inputs: QuantizeInputs) -> None:
        """Write `outputs`, which have these shapes."""
        x, plan, seed, group_offset, scale, dy, probs, gamma, beta, unchanged, order, each, mxfp4, only = inputs
        # unaligned rows would need a workspace for a prologue's result, and there is none; kernels for interleaved
        # halves read aligned rows alone
        as_read = as_rows if self.spec.prologue == "none" and not self._is_interleaved else aligned_rows
        rows, stride = as_read(x)
        addresses = list(map(address, outputs))
        placed: dict[str, int] = {"plan": 0 if plan is None else plan.data_ptr()}
        if order is not None:
            order = order.contiguous()
            placed |= {"index": address(order), "each": each, "count": x.shape[0]}
        if mxfp4 is not None:
            mxfp4, stride = mxfp4.contiguous(), shapes.constants["cols"]
            placed["mxfp4_scales"] = address(mxfp4)
        arguments: dict[str, Any] = {
            "input": InputArgs(x=address(rows), row_stride=stride, **placed, **shapes.constants)
        }
        first = 0
        for direction, layout, names in self._planes:
            end = first + len(names)
            if only is None or only == direction or self._shared:
                arguments[direction] = _plane(layout, addresses[first:end])
            first = end
        extras = dict(zip(self.extras, addresses[first:], strict=True))
        if self.spec.prologue != "none":
            prologue = dict(self._prologue)
            if dy is not None:
                dy, prologue["dy_stride"] = as_read(dy)
                prologue["dy"] = address(dy)
            if probs is not None:
                probs = probs.contiguous()
                prologue["probs"] = address(probs)
            if gamma is not None:
                gamma, beta = in_pieces(gamma), None if beta is None else in_pieces(beta)
                prologue["gamma"], prologue["beta"] = address(gamma), address(beta)
            for name in _PROLOGUE_OUTPUTS:
                prologue[name] = extras.pop(name, 0)
            arguments["prologue"] = PrologueArgs(**prologue)
        arguments |= extras
        if seed is not None:
            arguments["seed"], arguments["group_offset"] = seed.data_ptr(), group_offset
        if scale is not None:
            scale = scale.contiguous()
            arguments["encode_scales"] = scale.data_ptr()
        if unchanged is not None:
            arguments["unchanged"] = unchanged.data_ptr()
        # alive until the launch: torch reuses memory in stream order, so afterwards it may go
        memory, arguments["workspace"] = workspace(shapes.workspace, x)
        arguments["workspace_bytes"] = shapes.workspace
        submit(self._native.run, x, arguments)
        del memory

    def record(self, into: octavo_native.Sequence, shapes: QuantizeShapes, cuda: bool, **places: int) -> None:
        """Append the launch on contiguous rows to `into`; `places` are its arrays, by octavo_native's names."""
        x, plan = places.pop("x"), places.pop("plan", 0)
        arguments: dict[str, Any] = {}
        for direction, layout, names in self._planes:
            arguments[direction] = _plane(layout, [places.pop(name) for name in names])
        arguments |= places
        self._native.run(
            cuda=cuda,
            input=InputArgs(x=x, row_stride=shapes.constants["cols"], plan=plan, **shapes.constants),
            prologue=PrologueArgs(**self._prologue),
            workspace_bytes=shapes.workspace,
            into=into,
            **arguments,
        )

    def tensor(self, shapes: QuantizeShapes, group_sizes: Tensor | None, outputs: list[Tensor]) -> GroupedTensor:
        """The GroupedTensor of a launch's outputs."""
        return GroupedTensor(shapes.spec, group_sizes, **{field: outputs[number] for field, number in self.fields})


@lru_cache(maxsize=1024)
def launch_of(text: str) -> QuantizeLaunch:
    """The launches of the LaunchSpec of this text."""
    return QuantizeLaunch(text)
