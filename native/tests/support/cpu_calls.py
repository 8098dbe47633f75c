"""Calls of the CPU kernels with numpy arrays, and what the definition says their outputs are, byte for byte.

Outputs are poisoned beforehand and lie between guards, and an expected array is poison wherever the contract says that
nothing is written: one comparison sees wrong values, missing ones and stray writes alike. Not tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from quantize_call import run_quantizer

import octavo_native as native
from octavo import QuantizerSpec
from octavo_native import layouts
from octavo_numerics import QuantizedArray, valid
from octavo_numerics.groups import Groups

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]

POISON = 0xA5
GUARD = 256
DTYPE = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
SCALE_DTYPE = {"fp32": np.dtype(np.float32), "e8m0": np.dtype(np.uint8), "e4m3": np.dtype(np.uint8)}
NATIVE = {"rowwise": layouts.NATIVE_ROWS, "columnwise": layouts.NATIVE_COLUMNS}


def aligned(count: int, dtype: npt.DTypeLike, to: int = 256) -> Array:
    """A zeroed array whose address is a multiple of `to`."""
    size = np.dtype(dtype).itemsize
    raw = np.zeros(count * size + to, np.uint8)
    start = -raw.ctypes.data % to
    return raw[start : start + count * size].view(dtype)


class Guarded:
    """Poisoned bytes of an array, aligned to 256, with guards on both sides."""

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.size = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        memory = np.full(self.size + 2 * GUARD + 256, POISON, dtype=np.uint8)
        start = GUARD + (-(memory.ctypes.data + GUARD)) % 256
        self._memory, self._start = memory, start

    @property
    def address(self) -> int:
        """0 for an array without elements, as frameworks give it."""
        return self._memory.ctypes.data + self._start if self.size else 0

    @property
    def bytes(self) -> U8:
        """The array's bytes, guards checked."""
        end = self._start + self.size
        assert (self._memory[: self._start] == POISON).all(), "bytes before the array were written"
        assert (self._memory[end:] == POISON).all(), "bytes after the array were written"
        return self._memory[self._start : end]

    @property
    def array(self) -> Array:
        """The array itself."""
        return self.bytes.view(self.dtype).reshape(self.shape)

    @property
    def untouched(self) -> bool:
        """True where every byte is still poison."""
        return bool((self.bytes == POISON).all())


def put(values: Array) -> Guarded:
    """A guarded copy of `values`."""
    out = Guarded(values.shape, values.dtype)
    out.bytes[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return out


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
        mxfp4=spec.mxfp4 == "rowwise",
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


def new_plane(spec: QuantizerSpec, op: Operand, cols: int, direction: str, layout: str) -> Arrays:
    """Poisoned outputs of one plane."""
    sides = {
        "format": spec.format,
        "scaling": spec.scaling,
        "square": spec.square,
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


# ---- the definition's arrays, in every layout


def leading(values: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> U8:
    """Bytes of an array of `shape` that begins with `values` and is poison after them."""
    out = np.full(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, POISON, dtype=np.uint8)
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    out[: data.size] = data
    return out


def flat_rows(values: Array, cols: int) -> Array:
    """[..., cols] as [rows, cols], cols perhaps 0."""
    return values.reshape(int(np.prod(values.shape[:-1])), cols)


def pack_pairs(codes: U8) -> U8:
    """[..., C] to [..., ceil(C / 2)], the even element low."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


@dataclass
class PanelRows:
    """One panel: number, rows of a payload and blocks of its scales that it holds."""

    number: int
    row0: int
    rows: int


def panels_of(sizes: npt.NDArray[np.int64]) -> list[PanelRows]:
    """Panels in use, groups in order; rows are packed as in `sizes`."""
    out = []
    row = 0
    for size in sizes.tolist():
        out += [PanelRows(0, row + at, min(128, size - at)) for at in range(0, size, 128)]
        row += size
    return [PanelRows(number, panel.row0, panel.rows) for number, panel in enumerate(out)]


def expected(
    q: QuantizedArray, spec: QuantizerSpec, op: Operand, direction: str, layout: str, cols: int
) -> dict[str, U8]:
    """Bytes of codes, scales and global of one plane."""
    planes = valid(q)
    codes = flat_rows(planes[direction].view(np.uint8), cols)
    scales = planes[f"{direction}_scale"]
    scale_dtype = SCALE_DTYPE[spec.scale_format]
    arrays = new_plane(spec, op, cols, direction, layout)
    out = {}
    if f"{direction}_global" in planes:
        out["global"] = leading(planes[f"{direction}_global"], (op.groups,), np.dtype(np.float32))
    size = spec.block_size
    if layout == layouts.NATIVE_COLUMNS:
        groups = Groups(op.group_sizes)
        groups = groups.padded() if spec.hadamard else groups
        grid = np.full((*arrays.codes.shape[:2], 128), POISON, dtype=np.uint8)
        panels = panels_of(groups.sizes)
        grid[: len(panels)] = 0
        for panel in panels:
            grid[panel.number, :, : panel.rows] = codes[panel.row0 : panel.row0 + panel.rows].T
        used = grid[: len(panels)]
        out["codes"] = leading(
            pack_pairs(used) if spec.format == "e2m1" else used, arrays.codes.shape, np.dtype(np.uint8)
        )
        if size is None or spec.square:
            out["scales"] = leading(scales, arrays.scales.shape, scale_dtype)
        else:
            out["scales"] = _panel_scales(flat_rows(scales, cols), panels, size, arrays.scales)
    else:
        rows = pack_pairs(codes) if layout == layouts.NATIVE_ROWS and spec.format == "e2m1" else codes
        out["codes"] = leading(rows, arrays.codes.shape, np.dtype(np.uint8))
        if layout == layouts.NATIVE_ROWS and spec.scaling == "block" and not spec.square:
            turned = np.full(arrays.scales.size, POISON, dtype=np.uint8).view(np.float32).reshape(arrays.scales.shape)
            compact = flat_rows(scales, arrays.scales.shape[0])
            turned[:, : len(compact)] = compact.T
            out["scales"] = turned.reshape(-1).view(np.uint8)
        else:
            out["scales"] = leading(scales, arrays.scales.shape, scale_dtype)
    return out


def _panel_scales(scales: Array, panels: list[PanelRows], size: int, into: Guarded) -> U8:
    """Columnwise block scales [blocks, C] as panels; blocks past a group's end are zero bytes."""
    grid = np.full(into.size, POISON, dtype=np.uint8).view(into.dtype).reshape(into.shape)
    block = 0
    for panel in panels:
        count = -(-panel.rows // size)
        mine = scales[block : block + count].view(into.dtype)
        if size == 128:
            grid[panel.number, : scales.shape[1]] = mine[0]
        else:
            grid[panel.number] = 0
            grid[panel.number, :, :count] = mine.T
        block += count
    return grid.reshape(-1).view(np.uint8)


def differences(
    result: Result, q: QuantizedArray, spec: QuantizerSpec, op: Operand, planes: dict[str, str]
) -> list[str]:
    """What of a call's planes is not what the definition says, in words."""
    out = []
    cols = q.spec.shape[-1]
    for direction, layout in planes.items():
        want = expected(q, spec, op, direction, layout, cols)
        for name, array in result.planes[direction].named.items():
            wrong = np.flatnonzero(array.bytes != want[name])
            if wrong.size:
                first = int(wrong[0])
                out.append(
                    f"{direction} {layout} {name}{list(array.shape)}: {wrong.size} bytes differ, first {first}: "
                    f"{array.bytes[first]:#x} for {want[name][first]:#x}"
                )
    return out
