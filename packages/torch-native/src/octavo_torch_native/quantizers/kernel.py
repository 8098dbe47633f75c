"""Kernel: a Work bound to octavo_native, and the shapes of what it makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

import octavo_native
from octavo import GroupedTensorSpec, QuantizerSpec
from octavo.formats import ScaleFormat
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Direction, Operand
from octavo_native import InputArgs, PlaneArgs, PrologueArgs
from octavo_native import layouts as native_layouts
from octavo_torch.plugin_api import DTYPE_NAMES, FP8_DTYPE, GroupedTensor, is_plain, quantizer_from
from octavo_torch_native.arrays.launch import address, aligned_rows, as_rows, submit, workspace
from octavo_torch_native.quantizers.work import Work, work_from

Shape = tuple[int, ...]

DTYPE_NUMBERS: dict[torch.dtype, int] = {dtype: octavo_native.DTYPES[name] for dtype, name in DTYPE_NAMES.items()}
SCALE_DTYPE: dict[ScaleFormat, torch.dtype] = {
    "fp32": torch.float32,
    "e8m0": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
}
PREFIX: dict[Direction, str] = {"rowwise": "row", "columnwise": "col"}
"""How octavo_native's names of a plane's arrays begin."""
_MOST_FRAMES = 1024
_PROLOGUE_OUTPUTS = ("dprobs", "mean", "rstd")


def native_quantizer(spec: QuantizerSpec, operand: Operand) -> octavo_native.Quantizer:
    """The spec in octavo_native's numbers."""
    return octavo_native.Quantizer(
        format=octavo_native.FORMATS[spec.format],
        scaling=octavo_native.SCALINGS[spec.scaling],
        operand=octavo_native.OPERANDS[operand],
        square=spec.square,
        stochastic=spec.stochastic,
        hadamard=spec.hadamard,
        power_of_two=spec.power_of_two,
        amax_epsilon=spec.amax_epsilon,
    )


@lru_cache(maxsize=256)
def quantizer_of(text: str) -> octavo_native.Quantizer:
    """What dequantizes and converts for the spec of this text."""
    spec = quantizer_from(text)
    return native_quantizer(spec, spec.role)


def layout_number(layout: str) -> int:
    """A layout's name in octavo_native's numbers."""
    number: int = octavo_native.LAYOUTS["plain" if layout == PLAIN else "native"]
    return number


def codes_dtype(spec: QuantizerSpec) -> torch.dtype:
    """A float8 type; uint8 for E2M1, which torch has no arithmetic for."""
    return torch.uint8 if spec.format == "e2m1" else FP8_DTYPE[spec.format]


def plane_shapes(layout: GroupedTensorSpec, direction: Direction, name: str) -> tuple[Shape, Shape]:
    """Shapes of a plane's codes and scales in the layout of that name."""
    if name == PLAIN:
        return layout.payload_shape(direction), layout.scale_shape(direction)
    return _native_shapes(layout.quantizer, layout.shape, layout.groups, direction, name)


def _native_shapes(
    spec: QuantizerSpec, shape: Shape, groups: int, direction: Direction, name: str
) -> tuple[Shape, Shape]:
    of_plane: dict[str, Any] = {
        "format": spec.format,
        "scaling": spec.scaling,
        "square": spec.square,
        "hadamard": spec.hadamard,
        "layout": name,
        "direction": direction,
        "groups": groups,
        **geometry(shape),
    }
    return native_layouts.codes_shape(**of_plane), native_layouts.scales_shape(**of_plane)


def geometry(shape: Shape) -> dict[str, int]:
    """rows, cols and matrix_rows of an operand of this shape, as octavo_native counts them."""
    if len(shape) == 2:
        return {"rows": shape[0], "cols": shape[1], "matrix_rows": 0}
    groups, rows, cols = shape
    return {"rows": groups * rows, "cols": cols, "matrix_rows": rows}


class Frame:
    """What a kernel makes of inputs of one shape: every output's shape and dtype, and how much scratch it takes.

    layout      of the codes; made when it is first asked for, because recorded launches never do
    constants   fields of octavo_native.InputArgs that follow from the shape
    """

    __slots__ = ("_layout", "_make_layout", "constants", "outputs", "workspace")

    def __init__(
        self,
        make_layout: Callable[[], GroupedTensorSpec],
        outputs: tuple[tuple[Shape, torch.dtype], ...],
        constants: dict[str, int],
        workspace: int,
    ) -> None:
        self._make_layout, self.outputs, self.constants, self.workspace = make_layout, outputs, constants, workspace
        self._layout: GroupedTensorSpec | None = None

    @property
    def layout(self) -> GroupedTensorSpec:
        layout = self._layout
        if layout is None:
            layout = self._layout = self._make_layout()
        return layout


class Kernel:
    """One Work's launches.

    fields     GroupedTensor's planes, each with the number of the output that holds it; shared codes have one output
    extras     names of the outputs after the planes
    arguments  octavo_native's names of all outputs
    """

    def __init__(self, work: Work) -> None:
        spec = work.quantizer
        self.work = work
        self.extras = [name for name in ("amax", "dequantized", "activated", "dbias", "dprobs") if getattr(work, name)]
        if work.prologue == "norm":
            self.extras += ["mean", "rstd"] if work.norm == "layer" else ["rstd"]
        self._native = native_quantizer(spec, work.operand)
        self._layouts = dict(zip(PREFIX, work.layouts, strict=True))
        self._frames: dict[tuple[Any, ...], Frame] = {}
        directions = spec.directions
        # plain shared codes and their scales are one array, whichever direction it is read in: the row data
        self._shared = spec.shares_codes and all(self._layouts[direction] == PLAIN for direction in directions)
        self._made: tuple[Direction, ...] = ("rowwise",) if self._shared else directions
        self._parts = ("", "_scale", "_global") if spec.scaling == "nvfp4" else ("", "_scale")
        made = {direction: number for number, direction in enumerate(self._made)}
        self.fields: list[tuple[str, int]] = [
            (direction + part, made["rowwise" if self._shared else direction] * len(self._parts) + number)
            for direction in directions
            for number, part in enumerate(self._parts)
        ]
        words = {"": "_codes", "_scale": "_scales", "_global": "_global"}
        self._words = [words[part] for part in self._parts]
        self.arguments = [PREFIX[direction] + word for direction in self._made for word in self._words]
        self.arguments += self.extras
        self._planes = [(direction, layout_number(self._layouts[direction])) for direction in self._made]
        self._prologue: dict[str, Any] = {
            "kind": octavo_native.PROLOGUES[work.prologue],
            "activation": octavo_native.ACTIVATIONS[work.activation],
            "norm": octavo_native.NORMS[work.norm],
        }
        if work.prologue == "norm":
            self._prologue["epsilon"] = work.epsilon

    def frame(self, x: Tensor, groups: int) -> Frame:
        """The frame for inputs like `x` in this many groups; kept, because making one takes longer than launching."""
        # sizes that a compiler traces are symbols, which are no keys
        shape = x.shape if is_plain(x) else tuple([int(size) for size in x.shape])
        key = (shape, groups, x.dtype, x.is_cuda)
        frame = self._frames.get(key)
        if frame is None:
            if len(self._frames) >= _MOST_FRAMES:
                self._frames.clear()
            frame = self._frames[key] = self.new_frame(tuple(shape), groups, x.dtype, x.is_cuda)
        return frame

    def new_frame(self, shape: Shape, groups: int, dtype: torch.dtype, cuda: bool) -> Frame:
        """The frame for inputs of this shape and dtype, [M, K] or [G, N, K]."""
        work, spec = self.work, self.work.quantizer
        made = (*shape[:-1], shape[-1] // 2) if work.halves else shape
        row_layout, column_layout = (
            self._layouts[direction] if direction in spec.directions else PLAIN for direction in PREFIX
        )
        make_layout = partial(
            GroupedTensorSpec,
            shape=made,
            groups=groups,
            ragged_axis=0 if len(shape) == 2 else None,
            quantizer=spec,
            rowwise_layout=row_layout,
            columnwise_layout=column_layout,
        )
        outputs: list[tuple[Shape, torch.dtype]] = []
        for direction in self._made:
            name = self._layouts[direction]
            if name == PLAIN:
                codes, scales = plane_shapes(make_layout(), direction, name)
            else:
                codes, scales = _native_shapes(spec, made, groups, direction, name)
            outputs += [(codes, codes_dtype(spec)), (scales, SCALE_DTYPE[spec.scale_format])]
            if spec.scaling == "nvfp4":
                outputs.append(((groups,), torch.float32))
        extras = {
            "amax": ((groups,), torch.float32),
            "dequantized": (made, torch.bfloat16),
            "activated": (made, dtype),
            "dbias": ((groups, made[-1]), torch.float32),
            "dprobs": (shape[:-1], torch.float32),
            "mean": (shape[:-1], torch.float32),
            "rstd": (shape[:-1], torch.float32),
        }
        outputs += [extras[name] for name in self.extras]
        size = self._native.workspace_bytes(
            cuda=cuda,
            dtype=DTYPE_NUMBERS[dtype],
            groups=groups,
            rowwise="rowwise" in self._made,
            columnwise="columnwise" in self._made,
            amax=work.amax,
            dbias=work.dbias,
            dprobs=work.dprobs,
            prologue=self._prologue["kind"],
            activation=self._prologue["activation"],
            norm=self._prologue["norm"],
            **geometry(shape),
        )
        constants = {"dtype": DTYPE_NUMBERS[dtype], "groups": groups, **geometry(shape)}
        return Frame(make_layout, tuple(outputs), constants, size)

    def run(
        self,
        frame: Frame,
        outputs: list[Tensor],
        x: Tensor,
        plan: Tensor | None,
        seed: Tensor | None,
        group_offset: int,
        scale: Tensor | None,
        dy: Tensor | None = None,
        probs: Tensor | None = None,
        gamma: Tensor | None = None,
        beta: Tensor | None = None,
        unchanged: Tensor | None = None,
    ) -> None:
        """Write `outputs`, which are as the frame says, from `x`."""
        # a prologue's kernels need room for its result where rows are not aligned, which no workspace is made for
        placed = as_rows if self.work.prologue == "none" else aligned_rows
        rows, stride = placed(x)
        addresses = list(map(address, outputs))
        arguments: dict[str, Any] = {
            "input": InputArgs(
                x=address(rows), row_stride=stride, plan=0 if plan is None else plan.data_ptr(), **frame.constants
            )
        }
        size, first = len(self._parts), 0
        for direction, layout in self._planes:
            factor = addresses[first + 2] if size == 3 else 0
            arguments[direction] = PlaneArgs(addresses[first], addresses[first + 1], factor, layout)
            first += size
        extras = dict(zip(self.extras, addresses[first:], strict=True))
        if self.work.prologue != "none":
            prologue = dict(self._prologue)
            if dy is not None:
                dy, prologue["dy_stride"] = placed(dy)
                prologue["dy"] = address(dy)
            if probs is not None:
                probs = probs.contiguous()
                prologue["probs"] = address(probs)
            if gamma is not None:
                gamma, beta = gamma.contiguous(), None if beta is None else beta.contiguous()
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
        # held until the launch: torch reuses memory in stream order, so afterwards it may go
        memory, arguments["workspace"] = workspace(frame.workspace, x)
        arguments["workspace_bytes"] = frame.workspace
        submit(self._native.run, x, arguments)
        del memory

    def record(self, into: octavo_native.Sequence, frame: Frame, cuda: bool, **places: int) -> None:
        """Append the launch on contiguous rows to `into`; `places` are its arrays, by octavo_native's names."""
        x, plan = places.pop("x"), places.pop("plan", 0)
        arguments: dict[str, Any] = {}
        for direction, layout in self._planes:
            codes, scales, *factors = [places.pop(PREFIX[direction] + word) for word in self._words]
            arguments[direction] = PlaneArgs(codes, scales, factors[0] if factors else 0, layout)
        arguments |= places
        self._native.run(
            cuda=cuda,
            input=InputArgs(x=x, row_stride=frame.constants["cols"], plan=plan, **frame.constants),
            prologue=PrologueArgs(**self._prologue),
            workspace_bytes=frame.workspace,
            into=into,
            **arguments,
        )

    def tensor(self, frame: Frame, group_sizes: Tensor | None, outputs: list[Tensor]) -> GroupedTensor:
        """The GroupedTensor of a launch's outputs."""
        return GroupedTensor(frame.layout, group_sizes, **{field: outputs[number] for field, number in self.fields})


@lru_cache(maxsize=1024)
def kernel_of(text: str) -> Kernel:
    """The kernel of the Work of this text."""
    return Kernel(work_from(text))
