"""Calls of the CPU kernels with numpy arrays. Not tests.

Outputs are poisoned beforehand and lie between guards (`guarded`), and what is expected of them (`expected_planes`) is
poison wherever the contract says that nothing is written: one comparison sees wrong values, missing ones and stray
writes alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from guarded import Array, Guarded, put
from quantize_call import run_quantizer

import octavo_native as native
from octavo import QuantizerSpec
from octavo.quantizer import Direction
from octavo_native import layouts

DTYPE = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
SCALE_DTYPE = {"fp32": np.dtype(np.float32), "e8m0": np.dtype(np.uint8), "e4m3": np.dtype(np.uint8)}
NATIVE = {"rowwise": layouts.NATIVE_ROWS, "columnwise": layouts.NATIVE_COLUMNS}


def quantizer(spec: QuantizerSpec, operand: str | None = None) -> Any:
    """The native quantizer of a spec."""
    return native.Quantizer(
        format=native.FORMATS[spec.format],
        scaling=native.SCALINGS[spec.scaling],
        operand=native.OPERANDS[operand or spec.role],
        square=spec.square,
        stochastic=spec.stochastic,
        hadamard=spec.hadamard,
        power_of_two=spec.power_of_two,
        amax_epsilon=spec.amax_epsilon,
        mxfp4=None if spec.mxfp4 is None else native.DIRECTIONS[spec.mxfp4],
        square_columns=spec.square_columns,
    )


def make_plan(sizes: npt.NDArray[Any], rows: int) -> tuple[Guarded, int]:
    """(plan, status word)."""
    given, status = put(sizes), put(np.zeros(1, dtype=np.int32))
    plan = Guarded((native.plan_words(rows, len(sizes)),), np.int64)
    native.plan(
        cuda=False,
        sizes=given.address,
        sizes_are_64=sizes.dtype == np.int64,
        groups=len(sizes),
        rows=rows,
        plan=plan.address,
        status=status.address,
    )
    return plan, int(status.array[0])


@dataclass
class Operand:
    """x [M, C] with group sizes, or stacked [G, N, C]; rows of memory may be further apart than C."""

    x: Array
    sizes: tuple[int, ...] | None
    row_stride: int = 0
    plan: Guarded | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None:
            self.plan, status = make_plan(np.array(self.sizes, dtype=np.int64), self.rows)
            assert status == 0

    @property
    def groups(self) -> int:
        return self.x.shape[0] if self.sizes is None else len(self.sizes)

    @property
    def matrix_rows(self) -> int:
        return self.x.shape[1] if self.sizes is None else 0

    @property
    def rows(self) -> int:
        return int(np.prod(self.x.shape[:-1]))

    @property
    def cols(self) -> int:
        return int(self.x.shape[-1])

    @property
    def group_sizes(self) -> npt.NDArray[np.int64]:
        return np.full(self.groups, self.matrix_rows) if self.sizes is None else np.array(self.sizes, dtype=np.int64)

    @property
    def sides(self) -> dict[str, int]:
        """The shape, without the columns."""
        return {"rows": self.rows, "groups": self.groups, "matrix_rows": self.matrix_rows}

    @property
    def place(self) -> dict[str, int]:
        """The shape and the plan, as calls take them."""
        return self.sides | ({"plan": self.plan.address} if self.plan else {})

    def memory(self) -> Guarded:
        """x with its row stride; what lies between rows is NaN."""
        stride = max(self.row_stride, self.cols)
        wide = np.full((self.rows, stride), np.nan, dtype=self.x.dtype)
        wide[:, : self.cols] = self.x.reshape(self.rows, self.cols)
        return put(wide)


@dataclass
class Arrays:
    """One plane's outputs."""

    codes: Guarded
    scales: Guarded
    factor: Guarded | None

    @property
    def addresses(self) -> dict[str, int]:
        return {
            "codes": self.codes.address,
            "scales": self.scales.address,
            "global": self.factor.address if self.factor else 0,
        }

    @property
    def named(self) -> dict[str, Guarded]:
        named = {"codes": self.codes, "scales": self.scales}
        return named | ({"global": self.factor} if self.factor else {})


def new_plane(spec: QuantizerSpec, op: Operand, cols: int, direction: Direction, layout: str) -> Arrays:
    """Poisoned outputs of one plane."""
    sides = {
        "format": spec.format,
        "scaling": spec.scaling,
        "square": spec.square_in(direction),
        "hadamard": spec.hadamard,
        "layout": layout,
        "direction": direction,
        "cols": cols,
        **op.sides,
    }
    return Arrays(
        Guarded(layouts.codes_shape(**sides), np.uint8),
        Guarded(layouts.scales_shape(**sides), SCALE_DTYPE[spec.scale_format]),
        Guarded((op.groups,), np.float32) if spec.scaling == "nvfp4" else None,
    )


@dataclass
class Result:
    """Outputs of one call."""

    planes: dict[str, Arrays]
    extra: dict[str, Guarded] = field(default_factory=dict)

    @property
    def everything(self) -> dict[str, Guarded]:
        named = {f"{d} {name}": array for d, plane in self.planes.items() for name, array in plane.named.items()}
        return named | self.extra


@dataclass
class Prepared:
    """A call with all its arrays alive."""

    quantizer: Any
    arguments: dict[str, Any]
    inputs: dict[str, Guarded]
    workspace: Guarded
    result: Result

    def __call__(self, **changes: Any) -> Result:
        """Run it, with some arguments replaced; inputs and guards are checked afterwards."""
        before = {name: array.bytes.copy() for name, array in self.inputs.items()}
        run_quantizer(self.quantizer, **(self.arguments | changes))
        assert self.workspace.bytes is not None
        for name, array in self.inputs.items():
            assert (array.bytes == before[name]).all(), f"{name} was written"
        return self.result


def prepare(
    spec: QuantizerSpec,
    op: Operand,
    planes: dict[str, str],
    *,
    seed: int = 0,
    operand: str | None = None,
    group_offset: int = 0,
    group_offset_device: int | None = None,
    scale: Array | None = None,
    wanted: tuple[str, ...] = (),
    unchanged: int | None = None,
    threads: int = 1,
    prologue: dict[str, Any] | None = None,
    out_cols: int = 0,
) -> Prepared:
    """A call that quantizes `op` into `planes` (direction to layout) and the `wanted` extra outputs.

    prologue    kind, activation or norm by name; dy, probs, gamma, beta as arrays; epsilon
    out_cols    columns of what is quantized, where the prologue changes them
    """
    cols = out_cols or op.cols
    prologue = dict(prologue or {})
    result = Result({direction: new_plane(spec, op, cols, direction, layout) for direction, layout in planes.items()})
    shapes = {
        "amax": ((op.groups,), np.float32),
        "dequantized": ((op.rows, cols), np.uint16),
        "activated": ((op.rows, cols), op.x.dtype),
        "dbias": ((op.groups, cols), np.float32),
        "dprobs": ((op.rows,), np.float32),
        "mean": ((op.rows,), np.float32),
        "rstd": ((op.rows,), np.float32),
    }
    result.extra = {name: Guarded(*shapes[name]) for name in wanted}
    kinds = {
        "prologue": native.PROLOGUES[prologue.pop("kind", "none")],
        "activation": native.ACTIVATIONS[prologue.pop("activation", "silu")],
        "norm": native.NORMS[prologue.pop("norm", "rms")],
    }
    arguments: dict[str, Any] = {"dtype": native.DTYPES[op.x.dtype.name], "cols": op.cols, **op.sides, **kinds}
    q = quantizer(spec, operand)
    needed = q.workspace_bytes(
        cuda=False,
        **arguments,
        rowwise="rowwise" in planes,
        columnwise="columnwise" in planes,
        amax="amax" in wanted,
        dbias="dbias" in wanted,
        dprobs="dprobs" in wanted,
    )
    inputs: dict[str, Guarded] = {"x": op.memory()}
    if spec.stochastic:
        inputs["seed"] = put(np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], dtype=np.uint32))
    if scale is not None:
        inputs["encode_scales"] = put(scale)
    if group_offset_device is not None:
        inputs["group_offset_device"] = put(np.array([group_offset_device], dtype=np.uint32))
    if unchanged is not None:
        inputs["unchanged"] = put(np.array([unchanged], dtype=np.int32))
    for name in ("dy", "probs", "gamma", "beta"):
        if name in prologue:
            inputs[name] = put(prologue[name])
    if "dy" in prologue:
        arguments["dy_stride"] = prologue["dy"].shape[-1]
    if "epsilon" in prologue:
        arguments["epsilon"] = prologue["epsilon"]
    workspace = Guarded((needed,), np.uint8)
    for direction, plane in result.planes.items():
        short = direction[:3]
        arguments |= {f"{short}_{name}": address for name, address in plane.addresses.items()}
        arguments[f"{short}_layout"] = int(planes[direction] != layouts.PLAIN)
    arguments |= {name: array.address for name, array in (inputs | result.extra).items()} | op.place
    arguments |= {
        "cuda": False,
        "threads": threads,
        "row_stride": max(op.row_stride, op.cols),
        "group_offset": group_offset,
        "workspace": workspace.address,
        "workspace_bytes": needed,
    }
    return Prepared(q, arguments, inputs, workspace, result)


def run(spec: QuantizerSpec, op: Operand, planes: dict[str, str], **more: Any) -> Result:
    """`prepare`, and the call."""
    return prepare(spec, op, planes, **more)()
