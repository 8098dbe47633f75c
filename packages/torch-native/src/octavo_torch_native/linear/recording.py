"""The launches of a layer's forward and backward, recorded for one number of rows.

Row planes are read in the pass that writes them, from its scratch, and so are both of dy; where a product is emulated
they hold values (octavo_torch_native.linear.values). The column planes of x and w wait for backward, in an arena of
their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import octavo_native
from octavo.quantizer import Operand
from octavo.recipe_base import Gemm
from octavo_native import place
from octavo_native.layouts import round_up
from octavo_registry.contract import gemm_form
from octavo_torch.plugin_api import OPERANDS, Bounded
from octavo_torch_native.arrays.launch import PIECE
from octavo_torch_native.gemm.launches import GemmLaunch
from octavo_torch_native.quantizers.launches import QuantizeLaunch
from octavo_torch_native.quantizers.planes import DTYPE_NUMBERS, PREFIX
from octavo_torch_native.quantizers.shapes import QuantizeShapes

X, W, PLAN, COLUMNS, SCRATCH, WORKSPACE, SEED, SCALE, HISTORY = range(1, 10)
"""Numbers of the arrays of both passes; COLUMNS holds the column planes that forward leaves for backward."""

SIZES, STATUS, BIAS, Y = range(10, 14)
"""Numbers of the arrays of forward alone."""

DY, DX, DW = range(10, 13)
"""Numbers of the arrays of backward alone."""

_FLOAT_BYTES = 4
_ALIGNMENT = 256

_UNQUANTIZED: dict[Operand, int] = {"x": X, "w": W, "dy": DY}

Places = dict[str, int]
"""Where arrays of a launch are, by octavo_native's names (row_codes, row_scales): an array's number and an offset."""


class LayerKernels:
    """What a layer launches, whatever the rows.

    quantizers     by operand
    measuring      the same, writing the groups' amax, too; of delayed scaling alone
    gemms          by name
    n, k, groups   out-features, in-features, groups
    dtype          of x and w; `row_dtype` of y and dy
    """

    def __init__(
        self,
        quantizers: Mapping[Operand, QuantizeLaunch],
        measuring: Mapping[Operand, QuantizeLaunch],
        gemms: Mapping[Gemm, GemmLaunch],
        sides: tuple[int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self.quantizers, self.measuring, self.gemms = quantizers, measuring, gemms
        self.n, self.k, self.groups = sides
        self.dtype, self.row_dtype = dtypes
        self._shapes_of_w: dict[QuantizeLaunch, QuantizeShapes] = {}  # the same for every number of rows

    def shapes(self, launch: QuantizeLaunch, operand: Operand, rows: int, cuda: bool) -> QuantizeShapes:
        """The shapes of `operand` in `launch`."""
        if operand == "dy":
            return launch.new_shapes((rows, self.n), self.groups, self.row_dtype, cuda)
        if operand == "x":
            return launch.new_shapes((rows, self.k), self.groups, self.dtype, cuda)
        shapes = self._shapes_of_w.get(launch)
        if shapes is None:
            shapes = launch.new_shapes((self.groups, self.n, self.k), self.groups, self.dtype, cuda)
            self._shapes_of_w[launch] = shapes
        return shapes


class Arena:
    """Arrays one behind the other in memory that is allocated at once, as the array of this number."""

    def __init__(self, number: int) -> None:
        self._number, self.bytes = number, 0

    def allocate(self, size: int) -> int:
        """The place of `size` bytes more."""
        start = round_up(self.bytes, _ALIGNMENT if size >= _ALIGNMENT else PIECE)
        self.bytes = start + size
        return place(self._number, start)

    def allocate_plane(self, launch: QuantizeLaunch, shapes: QuantizeShapes, prefix: str) -> Places:
        """The places of the arrays of one plane; none where the launch does not write it."""
        return {
            name: self.allocate(math.prod(shape) * dtype.itemsize)
            for name, (shape, dtype) in zip(launch.arguments, shapes.outputs, strict=True)
            if name.startswith(prefix)
        }


class LayerPass:
    """The recorded launches of one pass, their arrays in scratch, and behind these the workspace that they use in turn.

    bytes          of both
    workspace_at   where the workspace begins
    """

    def __init__(self, cuda: bool) -> None:
        self.sequence = octavo_native.Sequence(cuda=cuda)
        self.scratch = Arena(SCRATCH)
        self.bytes = self.workspace_at = self._workspace = 0

    def workspace(self, size: int) -> Places:
        """The place of a launch's workspace of `size` bytes; none for none."""
        self._workspace = max(self._workspace, size)
        return {"workspace": place(WORKSPACE)} if size else {}

    def finish(self) -> None:
        """Fixes where the workspace begins, once everything is recorded."""
        self.workspace_at = round_up(self.scratch.bytes, _ALIGNMENT)
        self.bytes = self.workspace_at + self._workspace


class LayerRecording:
    """Both passes over `rows` rows, each recorded when it is first asked for.

    plan_words     int64 words of the plan
    column_bytes   of the column planes that forward leaves for backward
    """

    def __init__(self, kernels: LayerKernels, rows: int, cuda: bool) -> None:
        self._kernels, self._rows, self._cuda = kernels, rows, cuda
        self.plan_words = octavo_native.plan_words(rows, kernels.groups)
        columns = Arena(COLUMNS)
        self._columns: dict[Operand, Places] = {
            operand: columns.allocate_plane(launch, kernels.shapes(launch, operand, rows, cuda), PREFIX["columnwise"])
            for operand, launch in kernels.quantizers.items()
            if operand != "dy"
        }
        self.column_bytes = columns.bytes
        self._passes: Bounded[tuple[Any, ...], LayerPass] = Bounded()

    def forward(
        self, sizes_are_64: bool, flagged: bool, bias: torch.dtype | None, slots: int, group_offset: int
    ) -> LayerPass:
        """Plan, quantizers, fprop.

        flagged   sizes out of bounds set the status word
        slots     of the history that the amax is recorded in; 0: it is not recorded
        """
        key = (sizes_are_64, flagged, bias, slots, group_offset)
        recorded = self._passes.get(key)
        if recorded is not None:
            return recorded
        new, kernels = LayerPass(self._cuda), self._kernels
        octavo_native.plan(
            cuda=self._cuda, sizes=place(SIZES), sizes_are_64=sizes_are_64, groups=kernels.groups, rows=self._rows,
            plan=place(PLAN), status=place(STATUS) if flagged else 0, into=new.sequence,
        )  # fmt: skip
        operands: list[Operand] = [operand for operand in OPERANDS[:2] if operand in kernels.quantizers]
        codes = self._quantize(new, operands, slots, group_offset)
        epilogue = {} if bias is None else {"bias": place(BIAS), "bias_dtype": DTYPE_NUMBERS[bias]}
        self._multiply(new, "fprop", codes, Y, **epilogue)
        new.finish()
        self._passes[key] = new
        return new

    def backward(self, need_dx: bool, need_dw: bool, slots: int, group_offset: int) -> LayerPass:
        """The quantizer of dy, and the GEMMs of the gradients that are needed."""
        key = (need_dx, need_dw, slots, group_offset)
        recorded = self._passes.get(key)
        if recorded is not None:
            return recorded
        new = LayerPass(self._cuda)
        codes = self._quantize(new, ["dy"] if "dy" in self._kernels.quantizers else [], slots, group_offset)
        codes |= {operand: {**self._columns.get(operand, {}), **codes.get(operand, {})} for operand in OPERANDS}
        if need_dx:
            self._multiply(new, "dgrad", codes, DX)
        if need_dw:
            self._multiply(new, "wgrad", codes, DW)
        new.finish()
        self._passes[key] = new
        return new

    def _quantize(
        self, new: LayerPass, operands: Sequence[Operand], slots: int, group_offset: int
    ) -> dict[Operand, Places]:
        """Where the codes of `operands` are, which follow one another in OPERANDS."""
        kernels = self._kernels
        codes: dict[Operand, Places] = {}
        launches = kernels.measuring if slots else kernels.quantizers
        per_operand = _FLOAT_BYTES * kernels.groups
        amax = new.scratch.allocate(per_operand * len(operands)) if slots else 0
        for number, operand in enumerate(operands):
            launch = launches[operand]
            shapes = kernels.shapes(launch, operand, self._rows, self._cuda)
            columns = self._columns.get(operand)
            if not columns:
                columns = new.scratch.allocate_plane(launch, shapes, PREFIX["columnwise"])
            planes = columns | new.scratch.allocate_plane(launch, shapes, PREFIX["rowwise"])
            more: Places = {"amax": amax + number * per_operand} if slots else {}
            if launch.spec.quantizer.scaling == "delayed":
                more["encode_scales"] = place(SCALE, OPERANDS.index(operand) * per_operand)
            if launch.spec.quantizer.stochastic:
                more["seed"], more["group_offset"] = place(SEED), group_offset
            more |= new.workspace(shapes.workspace)
            if operand != "w":
                more["plan"] = place(PLAN)
            launch.record(new.sequence, shapes, self._cuda, x=place(_UNQUANTIZED[operand]), **planes, **more)
            codes[operand] = planes
        if slots and operands:
            first = OPERANDS.index(operands[0]) * slots * per_operand
            octavo_native.record_amax(
                cuda=self._cuda, amax=amax, history=place(HISTORY, first), operands=len(operands), slots=slots,
                groups=kernels.groups, into=new.sequence,
            )  # fmt: skip
        return codes

    def _multiply(self, new: LayerPass, gemm: Gemm, codes: Mapping[Operand, Places], out: int, **epilogue: int) -> None:
        kernels = self._kernels
        launch = kernels.gemms[gemm]
        shapes = launch.shapes(self._rows, kernels.n, kernels.k, kernels.groups, self._cuda)
        places = {"plan": place(PLAN), "out": place(out), **epilogue, **new.workspace(shapes.workspace)}
        form = gemm_form(gemm, "nk")
        for side, operand, direction in zip(("left", "right"), form.operands, form.directions, strict=True):
            prefix = PREFIX[direction]
            if launch.quantized:
                planes = codes[operand]
                places[side], places[f"{side}_scales"] = planes[f"{prefix}_codes"], planes.get(f"{prefix}_scales", 0)
                places[f"{side}_global"] = planes.get(f"{prefix}_global", 0)
            else:
                places[side] = place(_UNQUANTIZED[operand])
        launch.record(new.sequence, shapes, self._cuda, **places)
