"""Quantizers that round to MXFP4's values first, on CPUs: the definition's bits. test_cuda_rounding.py has a GPU's."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from cpu_calls import DTYPE, NATIVE, Operand, prepare, run
from cpu_operands import random_operand
from expected_planes import differences

import octavo_native as native
from octavo import MXFP4Weights, QuantizerSpec
from octavo_native import support
from octavo_native.layouts import PLAIN
from octavo_numerics import quantize

_W = MXFP4Weights().quantizer("w")
assert _W is not None
SPEC: QuantizerSpec = _W
SPECS = {axis: QuantizerSpec(**{**dict(SPEC), "mxfp4": axis}) for axis in ("rowwise", "columnwise")}
ORIENTATIONS = (("rowwise",), ("columnwise",), ("rowwise", "columnwise"))
DTYPES = ("bfloat16", "float32")


def check(spec: QuantizerSpec, op: Operand, planes: dict[str, str], threads: int = 1) -> None:
    """One call against the definition."""
    q = quantize(op.x, spec, op.sizes)
    about = f"{op.x.shape} {op.x.dtype} sizes {op.sizes} stride {op.row_stride} {planes} threads {threads}"
    assert not (found := differences(run(spec, op, planes, threads=threads), q, spec, op, planes)), f"{about}: {found}"


@pytest.mark.parametrize(("axis", "directions", "dtype"), list(product(SPECS, ORIENTATIONS, DTYPES)))
def test_codes_are_those_of_the_definition(
    axis: str, directions: tuple[str, ...], dtype: str, rng: np.random.Generator
) -> None:
    """Ragged rows and matrices, sides around every edge of 32s and tiles, zeros, subnormals, NaN and infinities; blocks
    of 32 along rows, and down columns, of weights that lie as [G, K, N]."""
    for threads in (0, 1, 2) * 6:
        op = random_operand(rng, SPECS[axis], dtype)
        check(SPECS[axis], op, {way: str(rng.choice([PLAIN, NATIVE[way]])) for way in directions}, threads)


def patterns(rng: np.random.Generator, dtype: str) -> np.ndarray:
    """Every bf16, or as many drawn fp32: neighbours in magnitude side by side, then the finite ones in any order."""
    if dtype == "bfloat16":
        bits = np.sort(np.arange(1 << 16, dtype=np.uint32) & 0x7FFF) << 16
    else:
        bits = np.sort(rng.integers(0, 1 << 31, 1 << 16, dtype=np.uint32))
    bits |= rng.integers(0, 2, bits.shape, dtype=np.uint32) << 31
    shuffled = rng.permutation(bits)
    shuffled = np.where(shuffled & 0x7F800000 == 0x7F800000, 0, shuffled)
    drawn = np.stack([bits, shuffled])
    return drawn.view(np.float32) if dtype == "float32" else (drawn >> 16).astype(np.uint16).view(DTYPE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_magnitude_is_rounded_as_defined(dtype: str, rng: np.random.Generator) -> None:
    """From subnormal blocks to those whose scale would be past the largest; a matrix is one row, or one column, so that
    no block of 128x128 takes its scale from others."""
    x = patterns(rng, dtype)
    for axis, sides in (("rowwise", (1, 128)), ("columnwise", (128, 1))):
        check(SPECS[axis], Operand(x.reshape(-1, *sides), None), {"rowwise": PLAIN, "columnwise": PLAIN})


def test_what_rounding_is_not_for_is_refused(rng: np.random.Generator) -> None:
    """Other quantizers, fp16, other outputs and columns: the sentence says so, and the support table, too."""
    op = Operand(rng.standard_normal((2, 32, 64)).astype(np.float32), None)
    planes = {"rowwise": PLAIN}
    for wanted in ("amax", "dequantized", "activated", "dbias"):
        with pytest.raises(ValueError, match="mxfp4 is for values as they are and for planes alone"):
            run(SPEC, op, planes, wanted=(wanted,))
    with pytest.raises(ValueError, match="mxfp4 is for bf16 and fp32 and dtype is f16"):
        run(SPEC, Operand(op.x.astype(np.float16), None), planes)
    with pytest.raises(ValueError, match="its values need none, so drop one"):
        prepare(SPEC, op, planes)(mxfp4_scales=256)
    for format, scaling, square in (("e5m2", "block", True), ("e4m3", "mxfp8", True), ("e4m3", "block", False)):
        made = native.Quantizer(
            format=native.FORMATS[format],
            scaling=native.SCALINGS[scaling],
            square=square,
            mxfp4=native.DIRECTIONS["rowwise"],
        )
        with pytest.raises(ValueError, match="mxfp4 rounds to values that E4M3 holds in square blocks of 128"):
            made.workspace_bytes(cuda=False, dtype=0, rows=1, cols=1, groups=1, rowwise=True, columnwise=False)
    served = [support.rounding_refusal(axis, "bfloat16") for axis in SPECS] + [
        support.rounding_refusal(None, "float16")
    ]
    assert served == [None] * 3
    assert "convert float16" in str(support.rounding_refusal("columnwise", "float16"))
