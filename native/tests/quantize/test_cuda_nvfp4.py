"""NVFP4's CUDA quantizers against the CPU's, which test_cpu_calls.py compares with the definition.

Two kernels serve a call: one that holds units of 16 rows (native layouts, two-byte values, nothing asked for besides
the planes), and the general one. Both have these bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import needs_device

from octavo_native import layouts

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from problems import (  # noqa: E402  it imports torch
    CPU,
    CUDA,
    DIRECTIONS,
    DTYPES,
    NATIVE_LAYOUT,
    SPECS,
    Extras,
    Plane,
    Shape,
    drawn_values,
    quantize,
    valid,
)

pytestmark = needs_device

NVFP4 = [spec for spec in SPECS if spec["scaling"] == "nvfp4"]
NAMES = ["-".join(str(value) for value in spec.values()) for spec in NVFP4]
EDGE_SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 300)
COLUMNS = (8, 16, 24, 120, 128, 136, 264, 520, 1040)
BY_KIND = ("normal", "every bit", "wide", "sparse", "subnormal", "huge", "not finite")


def defined(spec: dict[str, Any], shape: Shape, plane: Plane) -> list[np.ndarray]:
    """What layouts define of codes, scales and factors; scales of panels' blocks that hold no row of a group are left
    out, which a group's NaN may have reached or not."""
    codes, scales, *rest = valid(spec, shape, plane)
    if plane.layout == layouts.NATIVE_COLUMNS and not spec.get("square"):
        starts = [min(128, size - row) for size in shape.real for row in range(0, size, 128)]
        live = np.arange(8) < -(-np.array(starts, dtype=np.int64)[:, None] // 16)
        scales = np.where(live[:, None], scales.reshape(-1, shape.cols, 8), 0)
    return [codes, scales, *rest]


def compare(
    spec: dict[str, Any],
    shape: Shape,
    x: Any,
    dtype: str,
    planes: dict[str, str],
    extras: tuple[Extras, Any],
    what: str,
) -> None:
    """One call on the device, of `x`, beside one on the CPU, of what its index makes of it."""
    through, moved = extras
    ours, _ = quantize(spec, shape, x.to("cuda"), dtype, planes, CUDA, through)
    theirs, _ = quantize(spec, shape, moved, dtype, planes, CPU, Extras())
    for mine, other in zip(ours, theirs, strict=True):
        for name, one, two in zip(
            ("codes", "scales", "factors"), defined(spec, shape, mine), defined(spec, shape, other), strict=False
        ):
            assert (one == two).all(), f"{what}: {mine.direction} {name}"


def wanted(rng: np.random.Generator) -> dict[str, str]:
    """Planes in layouts; most often both as GEMMs read them."""
    if rng.random() < 0.5:
        return dict(NATIVE_LAYOUT)
    ways = [way for way in DIRECTIONS if rng.random() < 0.7] or [DIRECTIONS[int(rng.integers(2))]]
    return {way: (NATIVE_LAYOUT[way], layouts.PLAIN)[int(rng.integers(2))] for way in ways}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", NVFP4, ids=NAMES)
def test_planes_are_those_of_the_cpu(rng: np.random.Generator, spec: dict[str, Any], dtype: str) -> None:
    """Every kind of value, ragged groups around every edge of a unit and a panel, matrices, tails (faults.md 8, 16)."""
    for kind in BY_KIND * 2:
        sizes, cols = tuple(int(size) for size in rng.choice(EDGE_SIZES, 7)), int(rng.choice(COLUMNS))
        shape = Shape(sizes, cols)
        if not spec.get("hadamard") and rng.random() < 0.5:
            shape = Shape((0,) * 3, cols, matrix_rows=int(rng.choice(EDGE_SIZES[1:])))
        x, planes = drawn_values(rng, shape.rows, cols, dtype, kind), wanted(rng)
        compare(spec, shape, x, dtype, planes, (Extras(), x), f"{kind} {sizes} x {cols} {shape.matrix_rows} {planes}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spec", NVFP4, ids=NAMES)
def test_rows_are_read_through_an_index(rng: np.random.Generator, spec: dict[str, Any], dtype: str) -> None:
    """Tokens that several rows repeat, and rows that stand nowhere."""
    for _ in range(6):
        sizes, cols, each = tuple(int(size) for size in rng.choice(EDGE_SIZES, 7)), int(rng.choice(COLUMNS)), 2
        shape = Shape(sizes, cols)
        count = max(1, shape.rows // each)
        tokens = drawn_values(rng, count, cols, dtype, "wide")
        index = torch.from_numpy(rng.integers(-2, count * each + 2, shape.rows))
        inside = (index >= 0) & (index < count * each)
        moved = torch.where(inside[:, None], tokens[index.clamp(0, count * each - 1) // each], 0)
        through = Extras(tensors={"index": index}, source={"each": each, "count": count})
        compare(spec, shape, tokens, dtype, wanted(rng), (through, moved), f"{sizes} x {cols} of {count} tokens")
