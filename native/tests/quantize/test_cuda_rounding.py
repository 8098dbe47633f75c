"""CUDA's quantizers that round to MXFP4's values first have the CPU's bits. Skipped where there is no device."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from devices import needs_device

import octavo_native as native
from octavo_native import layouts

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from problems import CPU, CUDA, DIRECTIONS, NATIVE_LAYOUT, Extras, Shape, assert_same, quantize  # noqa: E402  it imports torch

pytestmark = needs_device


@pytest.mark.parametrize(("dtype", "axis"), list(product(["bfloat16", "float32"], DIRECTIONS)))
def test_weights_rounded_to_mxfp4_have_the_bits_of_the_cpu(rng: np.random.Generator, dtype: str, axis: str) -> None:
    """Every bf16 and millions of fp32, magnitudes sorted and mixed, in blocks of 32 along rows and down columns;
    columns that kernels load whole, and others."""
    spec = {"scaling": "block", "format": "e4m3", "square": True, "power_of_two": True, "operand": "w"}
    spec["mxfp4"] = native.DIRECTIONS[axis]
    for cols, count in (
        (128, 1 << 16),
        (96, 96 << 10),
        (37, 37 << 10),
        (2048, 1 << (21 if dtype == "float32" else 16)),
    ):
        bits = rng.integers(0, 1 << 31, count, dtype=np.uint32)
        if dtype == "bfloat16":
            bits = (np.arange(count, dtype=np.uint32) & 0x7FFF) << 16
        finite = np.where(bits >= 0x7F800000, bits & 0x3FFFFFFF, bits)
        signs = rng.integers(0, 2, bits.shape, dtype=np.uint32) << 31
        for part in (np.sort(bits), np.sort(finite), rng.permutation(finite), rng.permutation(bits)):
            x = torch.from_numpy((part | signs).view(np.float32).reshape(-1, cols)).to(getattr(torch, dtype))
            if axis == "columnwise":  # neighbours in magnitude one below the other
                x = x.mT.contiguous().view(x.shape)
            for rows in (1, 16, min(64, len(x))):  # of a matrix: a block of its own for each, for several, and two
                shape = Shape((0,) * (x.shape[0] // rows), cols, matrix_rows=rows)
                planes = dict(zip(DIRECTIONS, ([layouts.PLAIN] * 2, NATIVE_LAYOUT.values())[rows > 1], strict=True))
                ours, theirs = (
                    quantize(spec, shape, x.to(at.device), dtype, planes, at, Extras()) for at in (CUDA, CPU)
                )
                assert_same(spec, shape, ours[0], theirs[0], f"{cols} columns, {rows} rows")
