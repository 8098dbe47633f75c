"""A case made ready to run: inputs, exactly as large outputs as the layouts ask for, and the one native call.

The arrays are torch tensors on either device; the call goes to `octavo_native` alone, so what is timed is the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import octavo_native as native
from octavo.formats import DType
from octavo.quantizer import Direction
from octavo_bench.harness.timing import Call
from octavo_bench.quantize.case import Case
from octavo_native import layouts

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
POISON = 0xA5
"""What outputs hold before a checked run: an output that nobody wrote then differs from the definition's."""

_PLAIN, _NATIVE = native.LAYOUTS["plain"], native.LAYOUTS["native"]


@dataclass(frozen=True)
class Setting:
    """Where a case runs: ragged rows (matrix_rows 0) or stacked matrices, on one device.

    rows     rows that are allocated; those past the sum of the sizes are a tail
    plan     the native plan of the sizes; empty for stacked matrices, which need none
    threads  of a call on the CPU
    """

    rows: int
    cols: int
    sizes: tuple[int, ...]
    dtype: DType
    device: str
    matrix_rows: int = 0
    threads: int = 1
    seed: int = 0
    plan: Tensor = field(init=False)
    sizes_tensor: Tensor = field(init=False)
    encode_scales: Tensor = field(init=False)
    rounding_seed: Tensor = field(init=False)

    def __post_init__(self) -> None:
        words = 0 if self.matrix_rows else native.plan_words(self.rows, len(self.sizes))
        draw = torch.Generator().manual_seed(self.seed)
        tensors = {
            "plan": torch.empty(words, dtype=torch.int64),
            "sizes_tensor": torch.tensor(self.sizes, dtype=torch.int64),
            "encode_scales": torch.exp2(4 * torch.rand(len(self.sizes), generator=draw)),
            "rounding_seed": torch.randint(1 << 62, (1,), generator=draw),
        }
        for name, value in tensors.items():
            object.__setattr__(self, name, value.to(self.device))
        if words:
            self.plan_call()()

    @property
    def cuda(self) -> bool:
        """True where the arrays are on a GPU."""
        return self.device == "cuda"

    def stream(self) -> int:
        """The stream that torch launches on just now, which differs inside a graph capture."""
        return torch.cuda.current_stream().cuda_stream if self.cuda else 0

    def plan_call(self) -> Call:
        """Writes `plan` from the sizes."""
        arguments: dict[str, Any] = {
            "cuda": self.cuda,
            "sizes": self.sizes_tensor.data_ptr(),
            "sizes_are_64": True,
            "groups": len(self.sizes),
            "rows": self.rows,
            "plan": self.plan.data_ptr(),
        }
        return lambda: native.plan(**arguments, stream=self.stream())

    def draw(self, cols: int, seed: int) -> Tensor:
        """Normal values [rows, cols] whose rows differ in size by up to 2^6, so that blocks get different scales."""
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(self.rows, cols, generator=generator, device=self.device, dtype=TORCH_DTYPES[self.dtype])
        return values.mul_(torch.exp2(torch.arange(self.rows, device=self.device) % 7 - 3)[:, None])


@dataclass(frozen=True)
class Plane:
    """One direction's output as bytes; `factor` is NVFP4's second level."""

    codes: Tensor
    scales: Tensor
    factor: Tensor | None


@dataclass(frozen=True)
class Problem:
    """A case on one set of buffers. `call` runs it; `planes` and `activated` are what it writes.

    `call` holds addresses alone: keep the problem, and with it `buffers`, for as long as it is called.
    """

    call: Call
    planes: dict[Direction, Plane]
    activated: Tensor | None
    buffers: tuple[Tensor, ...]


def native_quantizer(case: Case) -> Any:
    """The native quantizer of a case."""
    spec = case.spec
    return native.Quantizer(
        format=native.FORMATS[spec.format],
        scaling=native.SCALINGS[spec.scaling],
        operand=native.OPERANDS[spec.role],
        square=spec.square,
        stochastic=spec.stochastic,
        hadamard=spec.hadamard,
        power_of_two=spec.power_of_two,
    )


_NATIVE_LAYOUT: dict[Direction, str] = {"rowwise": layouts.NATIVE_ROWS, "columnwise": layouts.NATIVE_COLUMNS}


def new_planes(case: Case, setting: Setting) -> dict[Direction, Plane]:
    """Poisoned outputs of exactly the size that the layouts give them."""
    return {direction: _new_plane(case, setting, direction) for direction in case.spec.directions}


def _new_plane(case: Case, setting: Setting, direction: Direction) -> Plane:
    spec = case.spec
    sides: dict[str, Any] = {
        "format": spec.format,
        "scaling": spec.scaling,
        "layout": _NATIVE_LAYOUT[direction] if case.native else layouts.PLAIN,
        "direction": direction,
        "rows": setting.rows,
        "cols": setting.cols,
        "groups": len(setting.sizes),
        "matrix_rows": setting.matrix_rows,
        "square": spec.square,
        "hadamard": spec.hadamard,
    }
    width = 4 if spec.scale_format == "fp32" else 1
    return Plane(
        codes=_poisoned(layouts.codes_shape(**sides), 1, setting.device),
        scales=_poisoned(layouts.scales_shape(**sides), width, setting.device),
        factor=_poisoned((len(setting.sizes),), 4, setting.device) if spec.scaling == "nvfp4" else None,
    )


def quantize_problem(case: Case, setting: Setting, x: Tensor, *, keep_activated: bool = False) -> Problem:
    """`x` [rows, cols], [rows, 2 cols] for SwiGLU, quantized into new planes."""
    quantizer = native_quantizer(case)
    planes = new_planes(case, setting)
    activated = torch.empty(setting.rows, setting.cols, dtype=x.dtype, device=x.device) if keep_activated else None
    kind = native.PROLOGUES["activation" if case.swiglu else "none"]
    activation = native.ACTIVATIONS["swiglu"]
    shape = {
        "dtype": native.DTYPES[setting.dtype],
        "rows": setting.rows,
        "cols": x.shape[1],
        "groups": len(setting.sizes),
        "matrix_rows": setting.matrix_rows,
    }
    needed = quantizer.workspace_bytes(
        **shape,
        cuda=setting.cuda,
        rowwise=case.has_rows,
        columnwise=case.has_columns,
        prologue=kind,
        activation=activation,
    )
    workspace = torch.empty(needed, dtype=torch.uint8, device=x.device)
    arguments: dict[str, Any] = {
        "cuda": setting.cuda,
        "input": native.InputArgs(x=x.data_ptr(), row_stride=x.stride(0), plan=setting.plan.data_ptr(), **shape),
        "prologue": native.PrologueArgs(kind=kind, activation=activation),
        "activated": _address(activated),
        "workspace": _address(workspace),
        "workspace_bytes": needed,
        "threads": setting.threads,
    }
    for direction, plane in planes.items():
        arguments[direction] = native.PlaneArgs(
            codes=plane.codes.data_ptr(),
            scales=plane.scales.data_ptr(),
            global_=_address(plane.factor),
            layout=_NATIVE if case.native else _PLAIN,
        )
    if case.recipe == "delayed":
        arguments["encode_scales"] = setting.encode_scales.data_ptr()
    if case.stochastic:
        arguments["seed"] = setting.rounding_seed.data_ptr()

    def call() -> None:
        quantizer.run(**arguments, stream=setting.stream())

    return Problem(call, planes, activated, (x, workspace))


def dequantize_problem(case: Case, setting: Setting, planes: dict[Direction, Plane]) -> Problem:
    """Column panels to bf16 panels [P][cols][128]."""
    quantizer, plane = native_quantizer(case), planes["columnwise"]
    bound = layouts.panel_bound(setting.rows, len(setting.sizes), setting.matrix_rows)
    out = torch.empty(bound, setting.cols, 128, dtype=torch.bfloat16, device=plane.codes.device)
    arguments = {
        "cuda": setting.cuda,
        "direction": native.DIRECTIONS["columnwise"],
        "codes": plane.codes.data_ptr(),
        "scales": plane.scales.data_ptr(),
        "global_": _address(plane.factor),
        "layout": _NATIVE,
        "rows": setting.rows,
        "cols": setting.cols,
        "groups": len(setting.sizes),
        "matrix_rows": setting.matrix_rows,
        "plan": setting.plan.data_ptr(),
        "out": out.data_ptr(),
        "out_dtype": native.DTYPES["bfloat16"],
        "out_layout": _NATIVE,
        "threads": setting.threads,
    }

    def call() -> None:
        quantizer.dequantize(**arguments, stream=setting.stream())

    return Problem(call, planes, None, (out,))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None or not tensor.numel() else tensor.data_ptr()


def _poisoned(shape: Sequence[int], width: int, device: str) -> Tensor:
    count = width
    for side in shape:
        count *= side
    return torch.full((count,), POISON, dtype=torch.uint8, device=device)
