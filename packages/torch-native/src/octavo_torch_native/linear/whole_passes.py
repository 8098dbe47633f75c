"""The launches of a whole layer's forward and backward, recorded for one number of rows.

Row planes are read in the pass that makes them, from its scratch; x's and w's column planes wait for backward, in one
piece of memory.
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
from octavo_native.gemms import OPERANDS_OF_GEMM
from octavo_native.layouts import round_up
from octavo_torch.plugin_api import OPERANDS
from octavo_torch_native.arrays.launch import PIECE
from octavo_torch_native.gemm.gemm import BOUND
from octavo_torch_native.gemm.product import Multiplier
from octavo_torch_native.quantizers.kernel import DTYPE_NUMBERS, PREFIX, Frame, Kernel

X, W, PLAN, KEPT, SCRATCH, WORKSPACE, SEED, SCALE, HISTORY = range(1, 10)
"""Numbers of the arrays of both passes."""

SIZES, STATUS, BIAS, Y = range(10, 14)
"""Numbers of forward's own."""

DY, DX, DW = range(10, 13)
"""Numbers of backward's own."""

_FLOAT = 4
_ALIGNMENT = 256

_UNQUANTIZED: dict[Operand, int] = {"x": X, "w": W, "dy": DY}

Places = dict[str, int]
"""Of an operand's arrays, by octavo_native's names: row_codes, row_scales ..."""


class Parts:
    """What a layer runs, whatever the rows.

    kernels        its quantizers
    recording      the same, returning the groups' amax, too; of delayed scaling alone
    products       its GEMMs
    n, k, groups   out-features, in-features, groups
    dtype          of x and w; `row_dtype` of y and dy
    """

    def __init__(
        self,
        kernels: Mapping[Operand, Kernel],
        recording: Mapping[Operand, Kernel],
        products: Mapping[Gemm, Multiplier],
        sides: tuple[int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self.kernels, self.recording, self.products = kernels, recording, products
        self.n, self.k, self.groups = sides
        self.dtype, self.row_dtype = dtypes
        self._of_w: dict[Kernel, Frame] = {}  # the same for every number of rows

    def frame(self, kernel: Kernel, operand: Operand, rows: int, cuda: bool) -> Frame:
        """What `kernel` makes of `operand`."""
        if operand == "dy":
            return kernel.new_frame((rows, self.n), self.groups, self.row_dtype, cuda)
        if operand == "x":
            return kernel.new_frame((rows, self.k), self.groups, self.dtype, cuda)
        frame = self._of_w.get(kernel)
        if frame is None:
            frame = kernel.new_frame((self.groups, self.n, self.k), self.groups, self.dtype, cuda)
            self._of_w[kernel] = frame
        return frame


class Piece:
    """Arrays one behind the other in memory that is allocated at once."""

    def __init__(self, number: int) -> None:
        self._number, self.bytes = number, 0

    def take(self, size: int) -> int:
        """The place of `size` bytes more."""
        start = round_up(self.bytes, _ALIGNMENT if size >= _ALIGNMENT else PIECE)
        self.bytes = start + size
        return place(self._number, start)


class Pass:
    """Recorded launches, their arrays in scratch, and behind these the workspace that they use in turn.

    bytes        of both
    workspace_at where the workspace begins
    """

    def __init__(self, cuda: bool) -> None:
        self.sequence = octavo_native.Sequence(cuda=cuda)
        self.scratch = Piece(SCRATCH)
        self.bytes = self.workspace_at = self._workspace = 0

    def take_workspace(self, size: int) -> Places:
        """The argument of a launch that needs so much."""
        self._workspace = max(self._workspace, size)
        return {"workspace": place(WORKSPACE)} if size else {}

    def finish(self) -> None:
        """Nothing more is recorded."""
        self.workspace_at = round_up(self.scratch.bytes, _ALIGNMENT)
        self.bytes = self.workspace_at + self._workspace


class Passes:
    """Both passes over `rows` rows, recorded when they are first asked for.

    plan_words   int64 words of the plan
    kept         bytes of the codes that forward leaves for backward
    """

    def __init__(self, parts: Parts, rows: int, cuda: bool) -> None:
        self._parts, self._rows, self._cuda = parts, rows, cuda
        self.plan_words = octavo_native.plan_words(rows, parts.groups)
        kept = Piece(KEPT)
        self._columns: dict[Operand, Places] = {
            operand: _take(kernel, parts.frame(kernel, operand, rows, cuda), PREFIX["columnwise"], kept)
            for operand, kernel in parts.kernels.items()
            if operand != "dy"
        }
        self.kept = kept.bytes
        self._made: dict[tuple[Any, ...], Pass] = {}

    def forward(
        self, sizes_are_64: bool, flagged: bool, bias: torch.dtype | None, slots: int, group_offset: int
    ) -> Pass:
        """Plan, quantizers, fprop.

        flagged   sizes out of bounds set the status word
        slots     of the history that amax goes into; 0: it goes nowhere
        """
        key = (sizes_are_64, flagged, bias, slots, group_offset)
        known = self._made.get(key)
        if known is not None:
            return known
        made, parts = Pass(self._cuda), self._parts
        octavo_native.plan(
            cuda=self._cuda, sizes=place(SIZES), sizes_are_64=sizes_are_64, groups=parts.groups, rows=self._rows,
            plan=place(PLAN), status=place(STATUS) if flagged else 0, into=made.sequence,
        )  # fmt: skip
        operands: list[Operand] = [operand for operand in OPERANDS[:2] if operand in parts.kernels]
        codes = self._quantize(made, operands, slots, group_offset)
        beside = {} if bias is None else {"bias": place(BIAS), "bias_dtype": DTYPE_NUMBERS[bias]}
        self._multiply(made, "fprop", codes, Y, **beside)
        made.finish()
        self._made[key] = made
        return made

    def backward(self, need_dx: bool, need_dw: bool, slots: int, group_offset: int) -> Pass:
        """dy's quantizer, and the GEMMs that are wanted."""
        key = (need_dx, need_dw, slots, group_offset)
        known = self._made.get(key)
        if known is not None:
            return known
        made = Pass(self._cuda)
        codes = self._quantize(made, ["dy"] if "dy" in self._parts.kernels else [], slots, group_offset)
        codes |= {operand: {**self._columns.get(operand, {}), **codes.get(operand, {})} for operand in OPERANDS}
        if need_dx:
            self._multiply(made, "dgrad", codes, DX)
        if need_dw:
            self._multiply(made, "wgrad", codes, DW)
        made.finish()
        self._made[key] = made
        return made

    def _quantize(
        self, made: Pass, operands: Sequence[Operand], slots: int, group_offset: int
    ) -> dict[Operand, Places]:
        """Where the codes of `operands` are; they follow one another in OPERANDS."""
        parts = self._parts
        codes: dict[Operand, Places] = {}
        kernels = parts.recording if slots else parts.kernels
        each = _FLOAT * parts.groups
        amax = made.scratch.take(each * len(operands)) if slots else 0
        for number, operand in enumerate(operands):
            kernel = kernels[operand]
            frame = parts.frame(kernel, operand, self._rows, self._cuda)
            places = self._columns.get(operand) or _take(kernel, frame, PREFIX["columnwise"], made.scratch)
            places = places | _take(kernel, frame, PREFIX["rowwise"], made.scratch)
            beside: Places = {"amax": amax + number * each} if slots else {}
            if kernel.work.quantizer.scaling == "delayed":
                beside["encode_scales"] = place(SCALE, OPERANDS.index(operand) * each)
            if kernel.work.quantizer.stochastic:
                beside["seed"], beside["group_offset"] = place(SEED), group_offset
            beside |= made.take_workspace(frame.workspace)
            if operand != "w":
                beside["plan"] = place(PLAN)
            kernel.record(made.sequence, frame, self._cuda, x=place(_UNQUANTIZED[operand]), **places, **beside)
            codes[operand] = places
        if slots and operands:
            first = OPERANDS.index(operands[0]) * slots * each
            octavo_native.record_amax(
                cuda=self._cuda, amax=amax, history=place(HISTORY, first), operands=len(operands), slots=slots,
                groups=parts.groups, into=made.sequence,
            )  # fmt: skip
        return codes

    def _multiply(self, made: Pass, gemm: Gemm, codes: Mapping[Operand, Places], out: int, **beside: int) -> None:
        multiplier, parts = self._parts.products[gemm], self._parts
        frame = multiplier.frame(self._rows, parts.n, parts.k, parts.groups, self._cuda)
        places = {"plan": place(PLAN), "out": place(out), **beside, **made.take_workspace(frame.workspace)}
        operands, directions = OPERANDS_OF_GEMM[gemm], BOUND[gemm].direction
        for number, side in enumerate(("left", "right")):
            operand, prefix = operands[number], PREFIX[directions[number]]
            if multiplier.quantized:
                held = codes[operand]
                places[side], places[f"{side}_scales"] = held[f"{prefix}_codes"], held[f"{prefix}_scales"]
                places[f"{side}_global"] = held.get(f"{prefix}_global", 0)
            else:
                places[side] = place(_UNQUANTIZED[operand])
        multiplier.record(made.sequence, frame, self._cuda, **places)


def _take(kernel: Kernel, frame: Frame, prefix: str, piece: Piece) -> Places:
    """Room for the arrays of one plane; none where the kernel does not make it."""
    return {
        name: piece.take(math.prod(shape) * dtype.itemsize)
        for name, (shape, dtype) in zip(kernel.arguments, frame.outputs, strict=True)
        if name.startswith(prefix)
    }
