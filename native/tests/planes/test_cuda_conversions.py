"""CUDA's dequantize and conversions of codes and scales are those of the CPU, byte for byte.

Skipped where there is no device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import needs_device

import octavo_native as native
from octavo_native import layouts

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from problems import (  # noqa: E402  it imports torch
    CPU,
    CUDA,
    DIRECTIONS,
    EDGE_SIZES,
    NATIVE_LAYOUT,
    SPECS,
    WIDTH,
    Place,
    Plane,
    Shape,
    address,
    filled,
    new_plane,
    quantizer,
)

pytestmark = needs_device

COLUMNS = (1, 3, 16, 36, 64, 100, 130, 264, 520)


def spec_name(spec: dict[str, Any]) -> str:
    """A test's name."""
    return "-".join(str(value) for value in spec.values())


def random_shapes(rng: np.random.Generator, spec: dict[str, Any]) -> list[Shape]:
    """Ragged rows with a tail and with bad sizes, and stacked matrices where they are defined."""
    ragged = [tuple(int(size) for size in rng.choice(EDGE_SIZES, 6)) for _ in range(2)]
    shapes = [Shape(sizes, int(rng.choice(COLUMNS))) for sizes in (*ragged, (0, 0), (-5, 140, 1 << 40, 9))]
    if not spec.get("hadamard"):
        matrix_rows = int(rng.choice(EDGE_SIZES[1:]))
        shapes.append(Shape((matrix_rows,) * 3, int(rng.choice(COLUMNS)), matrix_rows=matrix_rows))
    return shapes


def random_plane(rng: np.random.Generator, spec: dict[str, Any], shape: Shape, direction: str, layout: str) -> Plane:
    """Random codes, and random scales of every kind: NaN, infinite, subnormal, of either sign."""
    plane = new_plane(spec, shape, direction, layout, CPU)
    high = 16 if spec["format"] == "e2m1" and layout == layouts.PLAIN else 256
    plane.codes.copy_(torch.from_numpy(rng.integers(0, high, plane.codes.numel(), dtype=np.uint8)))
    scales = rng.integers(0, 256, plane.scales.numel(), dtype=np.uint8)
    if WIDTH[spec["scaling"]] == 4:
        ordinary = np.exp2(rng.uniform(-20, 20, scales.size // 4)).astype(np.float32)
        scales = np.where(rng.random(ordinary.size) < 0.8, ordinary, scales.view(np.float32)).view(np.uint8)
    plane.scales.copy_(torch.from_numpy(scales))
    if plane.factor is not None:
        factors = np.exp2(rng.uniform(-20, 20, len(shape.sizes))).astype(np.float32)
        factors[rng.random(factors.size) < 0.1] = np.nan
        plane.factor.copy_(torch.from_numpy(factors.view(np.uint8)))
    return plane


def moved(plane: Plane, place: Place) -> Plane:
    """The same arrays on `place`."""
    factor = None if plane.factor is None else plane.factor.to(place.device)
    codes, scales = plane.codes.to(place.device), plane.scales.to(place.device)
    return Plane(plane.direction, plane.layout, codes, scales, factor)


def sides_of(shape: Shape, direction: str, place: Place) -> dict[str, Any]:
    """Arguments that dequantize and convert share."""
    return {
        "cuda": place.cuda,
        "stream": torch.cuda.current_stream().cuda_stream if place.cuda else 0,
        "direction": native.DIRECTIONS[direction],
        "cols": shape.cols,
        "plan": address(shape.plan(place)),
        **shape.arguments,
    }


def dequantized(
    spec: dict[str, Any], shape: Shape, source: Plane, dtype: str, panels: bool, place: Place
) -> np.ndarray:
    """Bytes of the values, poison where nothing is written."""
    plane = moved(source, place)
    if panels:
        count = layouts.panel_bound(shape.rows, len(shape.sizes), shape.matrix_rows) * layouts.PANEL_ROWS * shape.cols
    else:
        padded = spec.get("hadamard") and source.direction == "columnwise"
        rows = layouts.block_bound(shape.rows, len(shape.sizes), 16) * 16 if padded else shape.rows
        count = rows * shape.cols
    out = filled((count,), 4 if dtype == "float32" else 2, place)
    quantizer(spec).dequantize(
        **sides_of(shape, source.direction, place),
        codes=address(plane.codes),
        scales=address(plane.scales),
        global_=address(plane.factor),
        layout=int(source.layout != layouts.PLAIN),
        out=address(out),
        out_dtype=native.DTYPES[dtype],
        out_layout=int(panels),
    )
    result: np.ndarray = out.cpu().numpy()
    return result


def converted(spec: dict[str, Any], shape: Shape, source: Plane, place: Place) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of codes and scales in the other layout, poison where nothing is written."""
    plane = moved(source, place)
    to = NATIVE_LAYOUT[source.direction] if source.layout == layouts.PLAIN else layouts.PLAIN
    into = new_plane(spec, shape, source.direction, to, place)
    quantizer(spec).convert(
        **sides_of(shape, source.direction, place),
        to=int(to != layouts.PLAIN),
        codes=address(plane.codes),
        scales=address(plane.scales),
        into_codes=address(into.codes),
        into_scales=address(into.scales),
    )
    return into.codes.cpu().numpy(), into.scales.cpu().numpy()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("spec", SPECS, ids=spec_name)
def test_dequantized_values_are_those_of_the_cpu(
    rng: np.random.Generator, spec: dict[str, Any], direction: str
) -> None:
    """Every code, scale, layout and dtype, NaN included; tails are zeros, unused panels left alone (faults.md 8)."""
    for shape in random_shapes(rng, spec):
        for layout in (layouts.PLAIN, NATIVE_LAYOUT[direction]):
            plane = random_plane(rng, spec, shape, direction, layout)
            for panels in (False, True) if direction == "columnwise" else (False,):
                for dtype in native.DTYPES:
                    ours, theirs = (dequantized(spec, shape, plane, dtype, panels, at) for at in (CUDA, CPU))
                    assert (ours == theirs).all(), f"{shape.sizes} x {shape.cols}, {layout} to panels {panels}, {dtype}"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("spec", SPECS, ids=spec_name)
def test_converted_planes_are_those_of_the_cpu(rng: np.random.Generator, spec: dict[str, Any], direction: str) -> None:
    """Codes and scales both ways; what no group holds is neither read nor written (faults.md 13, 59)."""
    for shape in random_shapes(rng, spec):
        for layout in (layouts.PLAIN, NATIVE_LAYOUT[direction]):
            plane = random_plane(rng, spec, shape, direction, layout)
            ours, theirs = (converted(spec, shape, plane, at) for at in (CUDA, CPU))
            for mine, other in zip(ours, theirs, strict=True):
                assert (mine == other).all(), f"{shape.sizes} x {shape.cols} from {layout}"


def on_bytes(call: Any, source: np.ndarray, size: int, place: Place, offset: int, **sides: Any) -> np.ndarray:
    """`size` bytes that `call` makes of `source`, which begins `offset` bytes past an aligned address."""
    held = torch.empty(source.size + offset, dtype=torch.uint8, device=place.device)
    held[offset:] = torch.from_numpy(source).to(place.device)
    out = filled((size,), 1, place)
    stream = torch.cuda.current_stream().cuda_stream if place.cuda else 0
    call(cuda=place.cuda, stream=stream, from_=address(held) + offset if source.size else 0, into=address(out), **sides)
    result: np.ndarray = out.cpu().numpy()
    return result


@pytest.mark.parametrize("to_swizzled", [True, False])
def test_swizzled_scales_are_those_of_the_cpu(rng: np.random.Generator, to_swizzled: bool) -> None:
    """Sides that fill no tile, strips of eight tiles and what is left of them, odd addresses (faults.md 13)."""
    for _ in range(60):
        outer, blocks = int(rng.integers(0, 600)), int(rng.choice([1, 3, 4, 6, 28, 31, 32, 64, 68, 224]))
        plain, swizzled = outer * blocks, layouts.round_up(outer, 128) * layouts.round_up(blocks, 4)
        read, written = (plain, swizzled) if to_swizzled else (swizzled, plain)
        source, offset = rng.integers(0, 256, read, dtype=np.uint8), int(rng.integers(0, 2))
        sides = {"outer": outer, "blocks": blocks, "to_swizzled": to_swizzled}
        ours, theirs = (on_bytes(native.swizzle_scales, source, written, at, offset, **sides) for at in (CUDA, CPU))
        assert (ours == theirs).all(), sides


@pytest.mark.parametrize("pack", [True, False])
def test_packed_codes_are_those_of_the_cpu(rng: np.random.Generator, pack: bool) -> None:
    """Odd columns keep half a byte unused; rows are packed one by one."""
    for _ in range(60):
        rows, cols = int(rng.integers(0, 200)), int(rng.choice([1, 2, 7, 16, 33, 64, 130, 512]))
        one, two = rows * cols, rows * layouts.ceil_div(cols, 2)
        read, written = (one, two) if pack else (two, one)
        source, offset = rng.integers(0, 16 if pack else 256, read, dtype=np.uint8), int(rng.integers(0, 2))
        sides = {"rows": rows, "cols": cols, "pack": pack}
        ours, theirs = (on_bytes(native.pack_e2m1, source, written, at, offset, **sides) for at in (CUDA, CPU))
        assert (ours == theirs).all(), sides


@pytest.mark.parametrize("dtype", native.DTYPES)
def test_expanded_mxfp4_is_that_of_the_cpu(rng: np.random.Generator, dtype: str) -> None:
    """Every byte with every scale, counts that fill no block of threads, and millions."""
    for blocks in (1, 3, 255, 257, 1 << 18, *(int(count) for count in rng.integers(1, 5000, 5))):
        codes = rng.integers(0, 256, (blocks, 16), dtype=np.uint8)
        scales = rng.integers(0, 256, blocks, dtype=np.uint8)
        results = []
        for place in (CUDA, CPU):
            held = [torch.from_numpy(array).to(place.device) for array in (codes, scales)]
            out = filled((blocks, 32), 4 if dtype == "float32" else 2, place)
            stream = torch.cuda.current_stream().cuda_stream if place.cuda else 0
            native.expand_mxfp4(
                cuda=place.cuda, stream=stream, codes=address(held[0]), scales=address(held[1]), blocks=blocks,
                out=address(out), out_dtype=native.DTYPES[dtype],
            )  # fmt: skip
            results.append(out.cpu().numpy())
        assert (results[0] == results[1]).all(), blocks
