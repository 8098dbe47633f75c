"""quantize_cpu against the definition, byte for byte, outputs poisoned: every scaling, format, layout and dtype.

docs/faults: rows 8, 14 (a NaN tail enters no amax and is not written over), 15, 24, 25 (sizes and columns that are no
multiple of a tile), 58 (row strides), 59 (scale planes of more than 2 x 3 blocks), 64 (padding changes no scale).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from cpu_calls import DTYPE, NATIVE, Operand, run
from cpu_operands import SPECS, random_operand, random_values
from expected_planes import differences

from octavo import QuantizerSpec
from octavo_native.layouts import PLAIN
from octavo_numerics import dequantize, quantize

ORIENTATIONS = (("rowwise",), ("columnwise",), ("rowwise", "columnwise"))


def check(rng: np.random.Generator, spec: QuantizerSpec, op: Operand, planes: dict[str, str], threads: int = 1) -> None:
    """One call against the definition: planes, amax and the dequantized copy."""
    seed, offset = int(rng.integers(1 << 63)), int(rng.choice([0, 3, 1000]))
    operand = str(rng.choice(["x", "w", "dy"]))
    scale = np.exp2(rng.normal(0, 3, op.groups)).astype(np.float32) if spec.scaling == "delayed" else None
    q = quantize(op.x, spec, op.sizes, seed=seed, operand=operand, group_offset=offset, scale=scale)
    wanted = ("amax", "dequantized") if "rowwise" in planes and rng.random() < 0.5 else ()
    device = int(rng.integers(0, offset + 1))
    result = run(
        spec,
        op,
        planes,
        seed=seed,
        operand=operand,
        group_offset=offset - device,
        group_offset_device=device,
        scale=scale,
        wanted=wanted,
        threads=threads,
    )
    about = f"{spec} {op.x.shape} {op.x.dtype} sizes {op.sizes} stride {op.row_stride} {planes} threads {threads}"
    assert not (found := differences(result, q, spec, op, planes)), f"{about}: {found}"
    if wanted:
        used = int(op.group_sizes.sum())
        values = dequantize(q, "rowwise").reshape(op.rows, op.cols)[:used]
        bits = values.astype(DTYPE["bfloat16"]).view(np.uint16)
        bits[np.isnan(values)] = 0x7FC0
        copy = result.extra["dequantized"].array
        assert (copy[:used] == bits).all(), about
        assert (copy[used:].view(np.uint8) == 0xA5).all(), about
        assert (result.extra["amax"].array.view(np.uint32) == amax_of_groups(op).view(np.uint32)).all(), about


def amax_of_groups(op: Operand) -> np.ndarray:
    """max |x| of each group, 0 without rows, the canonical NaN where one is in it."""
    rows = np.abs(op.x.reshape(op.rows, op.cols).astype(np.float32))
    ends = np.cumsum(op.group_sizes)
    groups = [rows[end - size : end] for end, size in zip(ends, op.group_sizes, strict=True)]
    out = np.array([np.max(group, initial=0) for group in groups], dtype=np.float32)
    out[np.isnan(out)] = np.uint32(0x7FC00000).view(np.float32)
    return out


@pytest.mark.parametrize("name", SPECS)
def test_every_combination_equals_the_definition(name: str, rng: np.random.Generator) -> None:
    """Orientation x dtype, three operands each, layouts and loops (plain, AVX2) drawn."""
    spec = SPECS[name].model_copy(update={"orientation": "both"})
    for directions, dtype in product(ORIENTATIONS, DTYPE):
        for threads in (0, 1, 1):
            op = random_operand(rng, spec, dtype)
            planes = {direction: str(rng.choice([PLAIN, NATIVE[direction]])) for direction in directions}
            check(rng, spec, op, planes, threads)


@pytest.mark.parametrize("name", SPECS)
def test_many_groups(name: str, rng: np.random.Generator) -> None:
    """1 100 groups, most of them small or empty."""
    spec = SPECS[name].model_copy(update={"orientation": "both"})
    sizes = tuple(int(size) for size in rng.choice([0, 0, 1, 2, 5, 17], 1100))
    x = random_values(rng, (sum(sizes) + 3, 17), "bfloat16")
    check(rng, spec, Operand(x, sizes), {"rowwise": NATIVE["rowwise"], "columnwise": NATIVE["columnwise"]})


@pytest.mark.parametrize("name", SPECS)
def test_an_operand_without_rows_or_columns_writes_its_group_scales(name: str, rng: np.random.Generator) -> None:
    """[G] and [G, C] scales exist where there is nothing to quantize: those of an amax of 0."""
    spec = SPECS[name].model_copy(update={"orientation": "both"})
    for shape, sizes in (((0, 20), (0, 0, 0)), ((9, 20), (0, 0, 0)), ((9, 0), (4, 0, 5))):
        op = Operand(np.full(shape, np.nan, dtype=np.float32), sizes)
        for layout in (PLAIN, "native"):
            planes = {d: PLAIN if layout == PLAIN else NATIVE[d] for d in ("rowwise", "columnwise")}
            check(rng, spec, op, planes)


@pytest.mark.parametrize("dtype", DTYPE)
def test_every_finite_and_non_finite_bit_pattern(dtype: str, rng: np.random.Generator) -> None:
    """All 2^16 patterns of the 16-bit dtypes, 2^16 drawn ones of fp32, through every scaling once."""
    if dtype == "float32":
        x = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    else:
        x = np.arange(1 << 16, dtype=np.uint16).view(DTYPE[dtype])
    x = x.reshape(256, 256)
    names = ("delayed.e4m3", "delayed.e5m2", "row.e4m3", "block.e5m2.pow2", "mxfp8.e4m3", "nvfp4.stochastic.hadamard")
    for name in names:
        spec = SPECS[name].model_copy(update={"orientation": "both"})
        check(rng, spec, Operand(x, (100, 100, 50)), {"rowwise": PLAIN, "columnwise": NATIVE["columnwise"]})


def test_wide_rows_cross_the_tiles(rng: np.random.Generator) -> None:
    """2 500 columns: more than one tile of the rowwise pass, which is wider than that of both directions."""
    for name, planes in (
        ("block.e4m3", {"rowwise": NATIVE["rowwise"]}),
        ("nvfp4.stochastic", {"rowwise": NATIVE["rowwise"]}),
        ("row.e4m3", {"rowwise": PLAIN, "columnwise": PLAIN}),
        ("mxfp8.e5m2", {"rowwise": PLAIN}),
    ):
        spec = SPECS[name].model_copy(update={"orientation": "both"})
        check(rng, spec, Operand(random_values(rng, (60, 2500), "bfloat16"), (20, 35)), planes)


def test_unchanged_leaves_every_output_as_it_is(rng: np.random.Generator) -> None:
    """The flag is read from memory: not 0 writes nothing at all, 0 is as if it were not given."""
    for name in SPECS:
        spec = SPECS[name].model_copy(update={"orientation": "both", "hadamard": False})
        op = Operand(random_values(rng, (3, 40, 50), "bfloat16"), None)
        scale = np.ones(3, dtype=np.float32) if spec.scaling == "delayed" else None
        planes = {"rowwise": PLAIN, "columnwise": NATIVE["columnwise"]}
        more: dict[str, Any] = {"scale": scale, "wanted": ("amax", "dequantized", "activated", "dbias")}
        skipped = run(spec, op, planes, unchanged=1, **more)
        assert all(array.untouched for array in skipped.everything.values()), name
        made, plain = run(spec, op, planes, unchanged=0, **more), run(spec, op, planes, **more)
        for key, array in made.everything.items():
            assert (array.bytes == plain.everything[key].bytes).all(), (name, key)
            assert not array.untouched, (name, key)
