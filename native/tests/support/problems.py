"""Small problems for the kernels: operands, exactly allocated outputs, one call, and the bytes that layouts define.

Not tests: `sanitize.py` drives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from quantize_call import run_quantizer
from torch import Tensor

import octavo_native as native
from octavo_native import layouts

POISON = 0xA5
DIRECTIONS = ("rowwise", "columnwise")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WIDTH = {"block": 4, "delayed": 4, "current": 4, "row": 4, "mxfp8": 1, "nvfp4": 1}
BLOCK = {"block": 128, "mxfp8": 32, "nvfp4": 16}
NATIVE_LAYOUT = {"rowwise": layouts.NATIVE_ROWS, "columnwise": layouts.NATIVE_COLUMNS}

SPECS: tuple[dict[str, Any], ...] = (
    {"scaling": "delayed", "format": "e4m3"},
    {"scaling": "delayed", "format": "e5m2"},
    {"scaling": "current", "format": "e4m3"},
    {"scaling": "current", "format": "e5m2", "power_of_two": True},
    {"scaling": "row", "format": "e4m3", "power_of_two": True},
    {"scaling": "row", "format": "e5m2"},
    {"scaling": "block", "format": "e4m3", "power_of_two": True},
    {"scaling": "block", "format": "e5m2"},
    {"scaling": "block", "format": "e4m3", "power_of_two": True, "square": True},
    {"scaling": "block", "format": "e4m3", "power_of_two": True, "square_columns": True},
    {"scaling": "block", "format": "e5m2", "square_columns": True},
    {"scaling": "mxfp8", "format": "e4m3"},
    {"scaling": "mxfp8", "format": "e5m2"},
    {"scaling": "mxfp8", "format": "e4m3", "square": True},
    {"scaling": "nvfp4", "format": "e2m1"},
    {"scaling": "nvfp4", "format": "e2m1", "stochastic": True, "operand": "dy"},
    {"scaling": "nvfp4", "format": "e2m1", "hadamard": True},
    {"scaling": "nvfp4", "format": "e2m1", "hadamard": True, "stochastic": True, "operand": "dy"},
    {"scaling": "nvfp4", "format": "e2m1", "square": True},
    {"scaling": "nvfp4", "format": "e2m1", "square": True, "stochastic": True, "operand": "w"},
)
"""Keyword arguments of `Quantizer`, by name."""

SIZES: tuple[tuple[int, ...], ...] = (
    (0, 1, 17, 130, 0, 96),
    (128, 256),
    (31, 0, 0, 33, 15, 16, 129, 1),
    (200,),
    (-3, 120, 1 << 62, 5),
    (64, -(1 << 63), 40, (1 << 63) - 1),
    (0, 0, 0),
)
"""Group sizes, good and bad; bad ones are cut by the plan."""

TAIL = 21
COLS = (272, 37, 128, 16, 131)
EDGE_SIZES = (0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 300)
"""Numbers of rows around the edges of blocks and panels."""

ACTIVATIONS = tuple(native.ACTIVATIONS)
GATED = tuple(native.ACTIVATIONS[name] for name in native.GATED)


def bounded(sizes: tuple[int, ...], rows: int) -> list[int]:
    """What the plan makes of `sizes`: negative ones count as 0, rows past `rows` are cut off."""
    left, result = rows, []
    for size in sizes:
        result.append(min(max(size, 0), left))
        left -= result[-1]
    return result


@dataclass
class Place:
    """Where a call runs: `cuda`, or threads on the CPU."""

    cuda: bool
    threads: int = 1

    @property
    def device(self) -> str:
        """torch's name."""
        return "cuda" if self.cuda else "cpu"

    @property
    def common(self) -> dict[str, Any]:
        """Arguments of a call that takes threads."""
        return {"cuda": self.cuda, "threads": self.threads}


CPU, CUDA = Place(cuda=False), Place(cuda=True)


@dataclass
class Shape:
    """A ragged operand (matrix_rows 0) or stacked matrices, with its plan on each place."""

    sizes: tuple[int, ...]
    cols: int
    matrix_rows: int = 0
    rows: int = field(init=False)
    real: list[int] = field(init=False)
    made: dict[tuple[bool, bool], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        good = sum(size for size in self.sizes if 0 < size < 1 << 20)
        self.rows = len(self.sizes) * self.matrix_rows if self.matrix_rows else good + TAIL
        self.real = [self.matrix_rows] * len(self.sizes) if self.matrix_rows else bounded(self.sizes, self.rows)

    @property
    def used(self) -> int:
        """Rows that belong to a group."""
        return sum(self.real)

    @property
    def arguments(self) -> dict[str, int]:
        """The operand's sides."""
        return {"rows": self.rows, "groups": len(self.sizes), "matrix_rows": self.matrix_rows}

    def plan(self, place: Place, wide: bool = True) -> Tensor:
        """The plan of the sizes, int64 or int32 ones; empty for stacked matrices."""
        if self.matrix_rows:
            return torch.empty(0, dtype=torch.int64, device=place.device)
        if (place.cuda, wide) not in self.made:
            self.made[place.cuda, wide] = self._new_plan(place, wide)
        return self.made[place.cuda, wide]

    def _new_plan(self, place: Place, wide: bool) -> Tensor:
        words = native.plan_words(self.rows, len(self.sizes))
        plan = torch.full((words,), -1, dtype=torch.int64, device=place.device)
        low, high = -(1 << 31), (1 << 31) - 1
        values = self.sizes if wide else [max(low, min(high, size)) for size in self.sizes]
        sizes = torch.tensor(values, dtype=torch.int64 if wide else torch.int32, device=place.device)
        status = torch.zeros(1, dtype=torch.int32, device=place.device)
        native.plan(
            cuda=place.cuda,
            sizes=sizes.data_ptr(),
            sizes_are_64=wide,
            groups=len(self.sizes),
            rows=self.rows,
            plan=plan.data_ptr(),
            status=status.data_ptr(),
        )
        cut = list(self.sizes) != self.real
        if int(status.item()) != int(cut):
            raise AssertionError(f"status is {status.item()} for sizes {self.sizes} in {self.rows} rows")
        return plan


@dataclass
class Plane:
    """One direction's arrays, as bytes."""

    direction: str
    layout: str
    codes: Tensor
    scales: Tensor
    factor: Tensor | None


def address(tensor: Tensor | None) -> int:
    """Where its data are, 0 for none."""
    return 0 if tensor is None or not tensor.numel() else tensor.data_ptr()


def filled(shape: tuple[int, ...], width: int, place: Place) -> Tensor:
    """Poisoned bytes for an array of this shape."""
    return torch.full((int(np.prod(shape, dtype=np.int64)) * width,), POISON, dtype=torch.uint8, device=place.device)


def square_in(spec: dict[str, Any], direction: str) -> bool:
    """Whether a scale of this plane covers a square block."""
    return bool(spec.get("square") or (spec.get("square_columns") and direction == "columnwise"))


def new_plane(spec: dict[str, Any], shape: Shape, direction: str, layout: str, place: Place) -> Plane:
    """Exactly allocated outputs."""
    factor = filled((len(shape.sizes),), 4, place) if spec["scaling"] == "nvfp4" else None
    if layout == layouts.VALUES:
        values = layouts.values_shape(direction=direction, cols=shape.cols, **shape.arguments)
        return Plane(direction, layout, filled(values, 2, place), filled((0,), 1, place), factor)
    sides = {
        "format": spec["format"],
        "scaling": spec["scaling"],
        "square": square_in(spec, direction),
        "hadamard": spec.get("hadamard", False),
        "layout": layout,
        "direction": direction,
        "cols": shape.cols,
        **shape.arguments,
    }
    return Plane(
        direction,
        layout,
        filled(layouts.codes_shape(**sides), 1, place),
        filled(layouts.scales_shape(**sides), WIDTH[spec["scaling"]], place),
        factor,
    )


def quantizer(spec: dict[str, Any]) -> Any:
    """The native quantizer of names."""
    numbers = {"format": native.FORMATS[spec["format"]], "scaling": native.SCALINGS[spec["scaling"]]}
    flags = ("square", "stochastic", "hadamard", "power_of_two", "mxfp4", "square_columns")
    options = {name: spec[name] for name in flags if name in spec}
    return native.Quantizer(**numbers, **options, operand=native.OPERANDS[spec.get("operand", "x")])


@dataclass
class Extras:
    """Outputs besides the planes, and the prologue with its operands (moved to the place of the call).

    source   `each` and `count`, where `index` is among the tensors; `interleaved_cols` or `interleaved_rows`
    """

    prologue: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    epsilon: float = 0.0
    source: dict[str, int] = field(default_factory=dict)


def quantize(
    spec: dict[str, Any], shape: Shape, x: Tensor, dtype: str, planes: dict[str, str], place: Place, extras: Extras
) -> tuple[list[Plane], dict[str, Tensor]]:
    """Planes in the layouts of `planes`, and the extra outputs, from one call at `place`."""
    made = [new_plane(spec, shape, direction, layout, place) for direction, layout in planes.items()]
    groups, rows, cols = len(shape.sizes), shape.rows, shape.cols
    element = x.element_size()
    extra_bytes = {
        "amax": 4 * groups,
        "dequantized": 2 * rows * cols,
        "activated": element * rows * cols,
        "dbias": 4 * groups * cols,
        "dprobs": 4 * rows,
        "forward": element * rows * (cols // 2 if extras.prologue.get("activation") in GATED else cols),
        "mean": 4 * rows,
        "rstd": 4 * rows,
    }
    extra = {name: filled((extra_bytes[name],), 1, place) for name in extras.wanted}
    at = {name: tensor.to(place.device) for name, tensor in extras.tensors.items()}
    packed = 2 if "mxfp4_scales" in at else 1  # elements per byte of x
    sides = {"dtype": native.DTYPES[dtype], "cols": packed * x.shape[1], **shape.arguments, **extras.prologue}
    made_by = quantizer(spec)
    needed = made_by.workspace_bytes(
        cuda=place.cuda,
        **sides,
        rowwise="rowwise" in planes,
        columnwise="columnwise" in planes,
        amax="amax" in extra,
        dequantized="dequantized" in extra,
        dbias="dbias" in extra,
        dprobs="dprobs" in extra,
        count=extras.source.get("count", 0),
    )
    workspace = torch.empty(needed, dtype=torch.uint8, device=place.device)
    encode = torch.exp2(torch.arange(groups) % 5 - 2.0).to(place.device)
    seed = torch.tensor([0x1234_5678_9ABC], dtype=torch.int64, device=place.device)
    plan = shape.plan(place, wide=cols % 2 == 0)
    arrays = {name: address(tensor) for name, tensor in (extra | at).items()}
    for plane in made:
        prefix = plane.direction[:3]
        arrays |= {
            f"{prefix}_codes": address(plane.codes),
            f"{prefix}_scales": address(plane.scales),
            f"{prefix}_global": address(plane.factor),
            f"{prefix}_layout": native.LAYOUTS[plane.layout if plane.layout in native.LAYOUTS else "native"],
        }
    run_quantizer(
        made_by,
        **place.common,
        **sides,
        **arrays,
        x=address(x),
        row_stride=packed * x.stride(0),
        plan=address(plan),
        encode_scales=address(encode) if spec["scaling"] == "delayed" else 0,
        seed=address(seed) if spec.get("stochastic") else 0,
        dy_stride=at["dy"].stride(0) if "dy" in at else 0,
        epsilon=extras.epsilon,
        **extras.source,
        workspace=address(workspace),
        workspace_bytes=needed,
    )
    if place.cuda:
        torch.cuda.synchronize()
    return made, extra


def valid(spec: dict[str, Any], shape: Shape, plane: Plane) -> list[np.ndarray]:
    """The bytes that the layout defines, whatever lies in the rest."""
    codes, scales = plane.codes.cpu().numpy(), plane.scales.cpu().numpy()
    scaling, cols, columnwise = spec["scaling"], shape.cols, plane.direction == "columnwise"
    panels = sum(-(-size // 128) for size in shape.real)
    if plane.layout == layouts.VALUES:
        codes = codes[: 2 * cols * (panels * 128 if columnwise else shape.used)]
        return [codes, *([] if plane.factor is None else [plane.factor.cpu().numpy()])]
    packed = spec["format"] == "e2m1" and plane.layout != layouts.PLAIN
    if plane.layout == layouts.NATIVE_COLUMNS:
        codes = codes[: panels * cols * (64 if packed else 128)]
    else:
        height = sum(-(-size // 16) * 16 for size in shape.real) if columnwise and spec.get("hadamard") else shape.used
        codes = codes[: height * (-(-cols // 2) if packed else cols)]
    size = BLOCK.get(scaling)
    if size is None:
        scales = scales[: 4 * shape.used] if scaling == "row" and not columnwise else scales
    elif square_in(spec, plane.direction):
        scales = scales[: WIDTH[scaling] * sum(-(-n // size) for n in shape.real) * -(-cols // size)]
    elif not columnwise:
        blocks = -(-cols // size)
        if scaling == "block" and plane.layout != layouts.PLAIN:
            scales = scales.reshape(blocks, -1, 4)[:, : shape.used]
        else:
            scales = scales[: WIDTH[scaling] * shape.used * blocks]
    elif plane.layout == layouts.PLAIN:
        scales = scales[: WIDTH[scaling] * sum(-(-n // size) for n in shape.real) * cols]
    elif scaling == "block":
        scales = scales.reshape(-1, -(-cols // 4) * 4, 4)[:panels, :cols]
    else:
        scales = scales[: panels * cols * (128 // size)]
    return [codes, scales, *([] if plane.factor is None else [plane.factor.cpu().numpy()])]


def assert_same(spec: dict[str, Any], shape: Shape, ours: Sequence[Plane], theirs: Sequence[Plane], what: str) -> None:
    """Planes of the same directions hold the same bytes in all that their layouts define."""
    for mine, true in zip(ours, theirs, strict=True):
        for one, two in zip(valid(spec, shape, mine), valid(spec, shape, true), strict=True):
            assert (one == two).all(), f"{what}: {mine.direction}"


def drawn_values(rng: np.random.Generator, rows: int, cols: int, dtype: str, kind: str) -> Tensor:
    """[rows, cols] of one kind, "normal", "every bit", "wide", "sparse", "subnormal", "huge" or "not finite".

    NaN and infinities stand in few rows, so that other groups stay finite.
    """
    x = rng.standard_normal((rows, cols))
    if kind == "wide":
        x *= np.exp2(rng.uniform(-40, 15, (rows, cols)))
    elif kind == "sparse":
        x *= rng.random((rows, cols)) < 0.03
    elif kind == "subnormal":
        x *= 1e-6 if dtype == "float16" else 1e-38
    elif kind == "huge":
        x *= 2e4 if dtype == "float16" else 1e38
    made = torch.from_numpy(x).to(DTYPES[dtype])
    if kind == "every bit":
        bits = np.int32 if dtype == "float32" else np.int16
        limits = np.iinfo(bits)
        drawn = rng.integers(limits.min, limits.max, (rows, cols), dtype=bits, endpoint=True)
        made = torch.from_numpy(drawn).view(DTYPES[dtype])
        made = torch.where(made.isfinite(), made, 0)
    if kind == "not finite":
        for row in rng.integers(0, max(rows, 1), min(rows, 2)):
            made[row, int(rng.integers(cols))] = float(rng.choice([np.nan, np.inf, -np.inf]))
    return made
