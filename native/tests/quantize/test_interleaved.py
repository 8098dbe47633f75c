"""Matrices of which halves of the columns or of the rows take turns in memory: every byte is that of the halves.

The CPU serves every spec; what the Hopper kernels serve is compared with it, and what they refuse is refused in words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_calls import NATIVE, Operand, prepare
from cpu_operands import SPECS, random_values
from devices import needs_device

from octavo_native.layouts import PLAIN

AXES = ("interleaved_cols", "interleaved_rows")


def in_turns(halves: np.ndarray, axis: str, block: int) -> np.ndarray:
    """Matrices [G, R, C] whose halves of columns, or of rows, take turns in blocks."""
    groups, rows, cols = halves.shape
    if axis == "interleaved_cols":
        return halves.reshape(groups, rows, 2, -1, block).swapaxes(2, 3).reshape(halves.shape)
    return halves.reshape(groups, 2, -1, block, cols).swapaxes(1, 2).reshape(halves.shape)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", list(SPECS))
def test_turns_give_the_bytes_of_halves(name: str, axis: str, rng: np.random.Generator) -> None:
    """Every scaling, format and dtype: panels that hold both halves, halves past a tile, gaps between the rows."""
    spec = SPECS[name].model_copy(update={"orientation": "both", "hadamard": False})
    for dtype, half, block, other in (("bfloat16", 130, 1, 40), ("float16", 24, 8, 17), ("float32", 9, 3, 150)):
        shape = (3, other, 2 * half) if axis == "interleaved_cols" else (3, 2 * half, other)
        halves = random_values(rng, shape, dtype)
        planes = {direction: str(rng.choice([PLAIN, NATIVE[direction]])) for direction in NATIVE}
        scale = np.exp2(rng.normal(0, 3, 3)).astype(np.float32) if spec.scaling == "delayed" else None
        how: dict[str, Any] = {"scale": scale, "wanted": ("amax",), "seed": int(rng.integers(1 << 63)), "threads": 2}
        turns = Operand(in_turns(halves, axis, block), None, row_stride=shape[-1] + int(rng.choice([0, 5])))
        ours = prepare(spec, turns, planes, **how)(**{axis: block}).everything
        for array, theirs in prepare(spec, Operand(halves, None), planes, **how)().everything.items():
            assert (ours[array].bytes == theirs.bytes).all(), (spec, dtype, block, array)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"interleaved_cols": 1, "interleaved_rows": 1}, "give one of them"),
        ({"interleaved_cols": -1}, "give one of them"),
        ({"interleaved_cols": 5}, "give a divisor of half"),
        ({"interleaved_rows": 1}, "give a divisor of half"),
        ({"interleaved_cols": 1, "matrix_rows": 0, "plan": 256}, "for stacked matrices"),
    ],
)
def test_what_takes_no_turns_is_refused(changes: dict[str, int], sentence: str, rng: np.random.Generator) -> None:
    """Both axes at once, blocks that do not divide a half, an odd number of rows, ragged rows."""
    call = prepare(SPECS["current.e4m3"], Operand(random_values(rng, (2, 7, 16), "bfloat16"), None), {"rowwise": PLAIN})
    with pytest.raises(ValueError, match=sentence):
        call(**changes)


SERVED: tuple[dict[str, Any], ...] = (
    {"scaling": "delayed", "format": "e4m3"},
    {"scaling": "current", "format": "e5m2", "power_of_two": True},
    {"scaling": "block", "format": "e4m3", "square": True},
    {"scaling": "block", "format": "e5m2", "square": True, "power_of_two": True},
)
"""Of the Hopper kernels."""


@needs_device
@pytest.mark.parametrize("block", [1, 8, 24])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("spec", SERVED, ids=lambda spec: "-".join(map(str, spec.values())))
def test_cuda_has_the_bytes_of_the_cpu(rng: np.random.Generator, spec: dict[str, Any], axis: str, block: int) -> None:
    """One plane and both, halves that end within a tile and within a square block, and more tiles than a device holds
    at once."""
    torch = pytest.importorskip("torch", reason="torch holds the memory of the device")
    from problems import CPU, CUDA, NATIVE_LAYOUT, Extras, Shape, assert_same, quantize

    extras = Extras(wanted=() if spec["scaling"] == "block" else ("amax",), source={axis: block})
    for groups, rows, cols in ((3, 240, 432), (2, 48, 2880), (40, 432, 1056)):
        shape = Shape((0,) * groups, cols, matrix_rows=rows)
        x = torch.from_numpy(rng.standard_normal((shape.rows, cols), dtype=np.float32)).bfloat16()
        x *= torch.exp2(torch.from_numpy(rng.integers(-20, 10, (shape.rows, 1))).bfloat16())
        x[int(rng.integers(shape.rows)), int(rng.integers(cols))] = float("nan")
        for ways in (tuple(NATIVE_LAYOUT), ("rowwise",), ("columnwise",)):
            planes = {way: NATIVE_LAYOUT[way] for way in ways}
            ours, extra = quantize(spec, shape, x.to("cuda"), "bfloat16", planes, CUDA, extras)
            theirs, other = quantize(spec, shape, x, "bfloat16", planes, CPU, extras)
            assert_same(spec, shape, ours, theirs, f"{groups} x {rows} x {cols}")
            for name, one in extra.items():
                assert (one.cpu().numpy() == other[name].numpy()).all(), name


@needs_device
def test_cuda_says_what_it_does_not_take_apart(rng: np.random.Generator) -> None:
    """A dtype, a scaling and blocks for which there is no kernel: none is quantized in another order in silence."""
    torch = pytest.importorskip("torch", reason="torch holds the memory of the device")
    from problems import CUDA, NATIVE_LAYOUT, Extras, Shape, quantize

    shape, planes = Shape((0,), 64, matrix_rows=32), {"rowwise": NATIVE_LAYOUT["rowwise"]}
    x = torch.from_numpy(rng.standard_normal((32, 64), dtype=np.float32)).cuda()
    for spec, dtype, block in (
        (SERVED[1], "float16", 1),
        ({"scaling": "row", "format": "e4m3"}, "bfloat16", 1),
        ({"scaling": "block", "format": "e4m3"}, "bfloat16", 1),
        (SERVED[2], "bfloat16", 4),
    ):
        through = Extras(source={"interleaved_cols": block})
        with pytest.raises(ValueError, match="give the halves"):
            quantize(spec, shape, x.to(getattr(torch, dtype)), dtype, planes, CUDA, through)
