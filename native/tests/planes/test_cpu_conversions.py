"""dequantize_cpu, convert_cpu, swizzled scales and packed E2M1, each against the definition or a formula of the test's.

docs/faults: rows 13 (round trips of layouts, one group with a tail), 59 (planes that are not square).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_calls import DTYPE, NATIVE, Arrays, Operand, new_plane, quantizer
from cpu_operands import SPECS, random_operand
from expected_planes import expected, flat_rows, pack_pairs, panels_of
from flushing import flushed_subnormals, sets_mode
from guarded import POISON, Guarded, put

import octavo_native as native
from octavo import QuantizerSpec
from octavo_native import layouts
from octavo_native.layouts import PLAIN
from octavo_numerics import QuantizedArray, dequantize, quantize
from octavo_numerics.casts import decode
from octavo_numerics.groups import Groups
from octavo_numerics.scales import canonical, e8m0_decode

DIRECTIONS = ("rowwise", "columnwise")


def quantized(rng: np.random.Generator, spec: QuantizerSpec) -> tuple[QuantizedArray, Operand]:
    """A random operand and what the definition makes of it; a NaN tail that must not be read."""
    op = random_operand(rng, spec, str(rng.choice(list(DTYPE))))
    scale = np.exp2(rng.normal(0, 3, op.groups)).astype(np.float32) if spec.scaling == "delayed" else None
    return quantize(op.x, spec, op.sizes, seed=int(rng.integers(1 << 40)), scale=scale), op


def plane_with(q: QuantizedArray, spec: QuantizerSpec, op: Operand, direction: str, layout: str) -> Arrays:
    """The definition's plane in `layout`, poison where it holds nothing."""
    arrays = new_plane(spec, op, op.cols, direction, layout)
    for name, values in expected(q, spec, op, direction, layout, op.cols).items():
        arrays.named[name].bytes[:] = values
    return arrays


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 `values` in `dtype` as unsigned integers, NaN canonical."""
    with np.errstate(all="ignore"):
        bits = values.astype(DTYPE[dtype]).view(np.uint32 if dtype == "float32" else np.uint16)
    bits[np.isnan(values)] = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}[dtype]
    return bits


@pytest.mark.parametrize("name", SPECS)
def test_dequantize_equals_the_definition(name: str, rng: np.random.Generator) -> None:
    """Both directions, layouts of input and output, and dtypes of the output; rows past the sum are +0."""
    spec = SPECS[name].model_copy(update={"orientation": "both"})
    for direction in DIRECTIONS:
        for layout in (PLAIN, NATIVE[direction]):
            for dtype in DTYPE:
                q, op = quantized(rng, spec)
                arrays = plane_with(q, spec, op, direction, layout)
                want = flat_rows(rounded(dequantize(q, direction), dtype), op.cols)
                panels = direction == "columnwise" and rng.random() < 0.5
                if panels:
                    want = in_panels(want, spec, op)
                out = Guarded(want.shape, want.dtype)
                quantizer(spec).dequantize(
                    cuda=False,
                    direction=native.DIRECTIONS[direction],
                    codes=arrays.codes.address,
                    scales=arrays.scales.address,
                    global_=arrays.factor.address if arrays.factor else 0,
                    layout=int(layout != PLAIN),
                    cols=op.cols,
                    out=out.address,
                    out_dtype=native.DTYPES[dtype],
                    out_layout=int(panels),
                    threads=int(rng.integers(0, 3)),
                    **op.place,
                )
                about = f"{spec} {op.x.shape} {op.sizes} {direction} {layout} {dtype} panels {panels}"
                assert (out.bytes == want.reshape(-1).view(np.uint8)).all(), about


def in_panels(values: np.ndarray, spec: QuantizerSpec, op: Operand) -> np.ndarray:
    """[rows, C] as [P, C, 128]: zeros past a group's end, poison in panels that no group has."""
    groups = Groups(op.group_sizes)
    groups = groups.padded() if spec.hadamard else groups
    poison = int.from_bytes(bytes([POISON] * values.itemsize), "little")
    count = new_plane(spec, op, op.cols, "columnwise", NATIVE["columnwise"]).codes.shape[0]
    out = np.full((count, op.cols, 128), poison, dtype=values.dtype)
    for panel in panels_of(groups.sizes):
        out[panel.number] = 0
        out[panel.number, :, : panel.rows] = values[panel.row0 : panel.row0 + panel.rows].T
    return out


@pytest.mark.parametrize("name", SPECS)
def test_layouts_convert_both_ways(name: str, rng: np.random.Generator) -> None:
    """plain to native gives the native arrays, native to plain the plain ones, whatever lies in unwritten parts."""
    spec = SPECS[name].model_copy(update={"orientation": "both"})
    for direction in DIRECTIONS:
        for _ in range(3):
            q, op = quantized(rng, spec)
            for source, target in ((PLAIN, NATIVE[direction]), (NATIVE[direction], PLAIN)):
                given, want = (plane_with(q, spec, op, direction, layout) for layout in (source, target))
                into = new_plane(spec, op, op.cols, direction, target)
                quantizer(spec).convert(
                    cuda=False,
                    direction=native.DIRECTIONS[direction],
                    to=int(target != PLAIN),
                    codes=given.codes.address,
                    scales=given.scales.address,
                    into_codes=into.codes.address,
                    into_scales=into.scales.address,
                    cols=op.cols,
                    threads=int(rng.integers(0, 3)),
                    **op.place,
                )
                about = f"{spec} {op.x.shape} {op.sizes} {direction} to {target}"
                assert (into.codes.bytes == want.codes.bytes).all(), about
                assert (into.scales.bytes == want.scales.bytes).all(), about


def swizzled_by_hand(scales: np.ndarray) -> np.ndarray:
    """[outer, blocks] padded to 128 x 4 tiles, each [4][32][4] turned to [32][4][4]."""
    outer, blocks = -(-scales.shape[0] // 128), -(-scales.shape[1] // 4)
    padded = np.zeros((outer * 128, blocks * 4), dtype=np.uint8)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    tiles = padded.reshape(outer, 4, 32, blocks, 4)  # tile row, quarter, row of it, tile column, block
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(-1)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (300, 11), (31, 130), (0, 4), (5, 0)])
def test_swizzled_scales(shape: tuple[int, int], rng: np.random.Generator) -> None:
    """To the tiles, padded with zeros, and back."""
    scales = rng.integers(0, 256, shape, dtype=np.uint8)
    want = swizzled_by_hand(scales)
    given, into = put(scales), Guarded(want.shape, np.uint8)
    sides = {"cuda": False, "outer": shape[0], "blocks": shape[1]}
    native.swizzle_scales(from_=given.address, into=into.address, to_swizzled=True, **sides)
    assert (into.bytes == want).all()
    back = Guarded(shape, np.uint8)
    native.swizzle_scales(from_=into.address, into=back.address, to_swizzled=False, **sides)
    assert (back.array == scales).all()


def test_one_scale_in_a_tile() -> None:
    """The formula of the PTX ISA: row r, block c of a tile is byte (r % 32) 16 + (r / 32) 4 + c."""
    for r, c in ((0, 0), (1, 0), (31, 3), (32, 0), (97, 2), (127, 3)):
        scales = np.zeros((128, 4), dtype=np.uint8)
        scales[r, c] = 9
        given, into = put(scales), Guarded((512,), np.uint8)
        native.swizzle_scales(cuda=False, from_=given.address, into=into.address, outer=128, blocks=4, to_swizzled=True)
        assert np.flatnonzero(into.bytes).tolist() == [r % 32 * 16 + r // 32 * 4 + c]


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (5, 7), (2, 300), (0, 4), (4, 0)])
def test_packed_e2m1(shape: tuple[int, int], rng: np.random.Generator) -> None:
    """Two codes a byte, the even column low, an odd last one beside 0; and back."""
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    want = pack_pairs(codes)
    given, into, back = put(codes), Guarded(want.shape, np.uint8), Guarded(shape, np.uint8)
    sides = {"cuda": False, "rows": shape[0], "cols": shape[1]}
    native.pack_e2m1(from_=given.address, into=into.address, pack=True, **sides)
    assert (into.array == want).all()
    native.pack_e2m1(from_=into.address, into=back.address, pack=False, **sides)
    assert (back.array == codes).all()


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize("blocks", [0, 1, 7, 300])
def test_expanded_mxfp4(blocks: int, dtype: str, rng: np.random.Generator) -> None:
    """E2M1 times a power of two for every byte and scale, in fp32 and rounded once: subnormals, infinities of fp16 and
    NaN of the scale 0xFF included."""
    codes = rng.integers(0, 256, (blocks, 16), dtype=np.uint8)
    scales = rng.integers(0, 256, blocks, dtype=np.uint8)
    scales[: min(blocks, 3)] = [0, 255, 254][: min(blocks, 3)]
    pairs = np.stack([codes & 15, codes >> 4], -1).reshape(blocks, 32)
    with np.errstate(all="ignore"):
        exact = decode(pairs, "e2m1").astype(np.float32) * e8m0_decode(scales)[:, None]
        want = canonical(exact).astype(DTYPE[dtype])
    out = Guarded((blocks, 32), DTYPE[dtype])
    held = put(codes), put(scales)
    sides = {"codes": held[0].address, "scales": held[1].address, "blocks": blocks, "out": out.address}
    native.expand_mxfp4(cuda=False, out_dtype=native.DTYPES[dtype], **sides)
    bits = np.uint32 if dtype == "float32" else np.uint16
    nan = np.isnan(want.astype(np.float32))
    assert (np.isnan(out.array.astype(np.float32)) == nan).all()
    assert (out.array.view(bits)[~nan] == want.view(bits)[~nan]).all()


@sets_mode
def test_mxfp4_of_a_caller_that_flushes_subnormals() -> None:
    """Values below fp32's normal numbers, whose scale is one itself: 2^-127 times every magnitude."""
    codes = put(np.arange(16, dtype=np.uint8) * 0x11)
    scales = put(np.zeros(1, np.uint8))
    out = Guarded((1, 32), np.float32)
    with flushed_subnormals():
        native.expand_mxfp4(
            cuda=False, codes=codes.address, scales=scales.address, blocks=1, out=out.address,
            out_dtype=native.DTYPES["float32"],
        )  # fmt: skip
    want = (decode(np.arange(16, dtype=np.uint8), "e2m1") * 2.0**-127).astype(np.float32).repeat(2)
    assert (out.array[0].view(np.uint32) == want.view(np.uint32)).all()


def test_hadamard_data_of_no_rows_have_values() -> None:
    """Each group may need a block of 16 rows, so that their values are not empty, and have an address."""
    groups, cols = 16, 32
    rows = layouts.block_bound(0, groups, 16) * 16
    call = {"cuda": False, "direction": 1, "codes": 0, "scales": 0, "rows": 0, "cols": cols, "groups": groups}
    hadamard = quantizer(SPECS["nvfp4.nearest.hadamard"])
    with pytest.raises(ValueError, match="out is null"):
        hadamard.dequantize(**call, out=0, out_dtype=0)
    out = Guarded((rows, cols), np.float32)
    hadamard.dequantize(**call, out=out.address, out_dtype=0)
    assert not out.array.any()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("dequantize", {"out": 0}, "out is null"),
    ("dequantize", {"out": 2}, "out is not aligned"),
    ("dequantize", {"codes": 0}, "scales and no codes"),
    ("dequantize", {"scales": 0}, "codes and no scales"),
    ("dequantize", {"scales": 2}, "not aligned to 4 bytes"),
    ("dequantize", {"direction": 0, "out_layout": 1}, "out_layout is native"),
    ("dequantize", {"plan": 0}, "plan is null"),
    ("dequantize", {"matrix_rows": 7}, "not groups \\* matrix_rows"),
    ("dequantize", {"threads": -1}, "threads is negative"),
    ("convert", {"codes": 0}, "lacks codes or scales"),
    ("convert", {"into_scales": 0}, "lacks codes or scales"),
    ("convert", {"into_scales": 2}, "not aligned to 4 bytes"),
    ("convert", {"cols": -1}, "cols is negative"),
    ("convert", {"threads": -1}, "threads is negative"),
]


@pytest.mark.parametrize(("what", "change", "word"), REFUSED)
def test_bad_arguments_are_refused(what: str, change: dict[str, Any], word: str, rng: np.random.Generator) -> None:
    """Small numbers are misaligned pointers, which nothing follows."""
    spec = SPECS["block.e4m3"].model_copy(update={"orientation": "both"})
    op = Operand(rng.standard_normal((20, 20)).astype(np.float32), (20,))
    arrays = new_plane(spec, op, op.cols, "columnwise", PLAIN)
    place = {"codes": arrays.codes.address, "scales": arrays.scales.address, "cols": op.cols, **op.place}
    if what == "dequantize":
        out = Guarded((20, 20), np.float32)
        call: dict[str, Any] = {"direction": 1, "out": out.address, "out_dtype": 0} | place
    else:
        out = Guarded((128 * 20,), np.uint8)
        call = {"direction": 1, "to": 1, "into_codes": out.address, "into_scales": out.address} | place
    with pytest.raises(ValueError, match=word):
        getattr(quantizer(spec), what)(cuda=False, **(call | change))
    assert out.untouched


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        ((-1, 4), "negative"),
        ((4, -1), "negative"),
        ((4, 4), "null"),
        ((1 << 41, 1), "past 2"),
        ((1 << 40, 1 << 24), "past 2"),
    ],
)
def test_bad_byte_arrays_are_refused(shape: tuple[int, int], word: str) -> None:
    """Null pointers and shapes that no array has."""
    rows, cols = shape
    with pytest.raises(ValueError, match=word):
        native.swizzle_scales(cuda=False, from_=0, into=0, outer=rows, blocks=cols, to_swizzled=True)
    with pytest.raises(ValueError, match=word):
        native.pack_e2m1(cuda=False, from_=0, into=0, rows=rows, cols=cols, pack=True)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"blocks": -1}, "blocks is negative"),
        ({"blocks": 1 << 41}, "blocks is past 2"),
        ({"scales": 0}, "codes, scales or out is null"),
        ({"codes": 2}, "codes is not aligned"),
        ({"out": 8}, "out is not aligned"),
        ({"out_dtype": 3}, "out_dtype is 3"),
    ],
)
def test_bad_mxfp4_is_refused(change: dict[str, int], word: str) -> None:
    """Small numbers are pointers, which nothing follows."""
    call = {"codes": 16, "scales": 16, "blocks": 1, "out": 16, "out_dtype": 2} | change
    with pytest.raises(ValueError, match=word):
        native.expand_mxfp4(cuda=False, **call)
