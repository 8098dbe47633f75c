"""Random operands for the CPU kernels: shapes around every edge of blocks and tiles, values of every kind."""

from __future__ import annotations

import numpy as np
from cpu_calls import DTYPE, Operand

from octavo import QuantizerSpec
from octavo_numerics.vectors import cases

KERNEL_CASES = tuple(cases())
"""Recorded cases that kernels quantize."""

SPECS: dict[str, QuantizerSpec] = {
    case.key.rsplit(".", 1)[0]: case.spec for case in KERNEL_CASES if case.operand is None and not case.spec.mxfp4
}
"""Those that take every dtype and make every output."""
EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 63, 127, 128, 129, 200)
COLUMNS = (1, 2, 7, 15, 16, 17, 31, 33, 64, 127, 128, 129, 160, 255, 256, 257, 300)


def random_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Bell-shaped, exponents spread by rows and columns; in one of four tensors subnormals or non-finite elements."""
    x = rng.standard_normal(shape).astype(np.float32)
    x *= np.exp2(rng.integers(-9, 9, (*shape[:-1], 1))).astype(np.float32)
    x *= np.exp2(rng.integers(-3, 3, shape[-1])).astype(np.float32)
    kind = rng.integers(8)
    if kind == 0:
        x *= np.float32(2.0**-140 if dtype != "float16" else 2.0**-20)
    elif kind == 1:
        x[rng.random(shape) < 0.002] = rng.choice(np.array([np.nan, np.inf, -np.inf], dtype=np.float32))
    elif kind == 2:
        x[rng.random(shape) < 0.7] = rng.choice(np.array([0.0, -0.0], dtype=np.float32))
    elif kind == 3:
        x *= np.float32(3e34 if dtype != "float16" else 2.0**8)
    with np.errstate(all="ignore"):
        return x.astype(DTYPE[dtype])


def random_operand(rng: np.random.Generator, spec: QuantizerSpec, dtype: str) -> Operand:
    """Ragged rows with a NaN tail, or stacked matrices; sizes and columns around every block and tile edge."""
    cols = int(rng.choice(COLUMNS))
    stride = cols + int(rng.choice([0, 0, 1, 8]))
    if not spec.hadamard and rng.random() < 0.35:
        shape = (int(rng.integers(1, 4)), int(rng.choice(EDGES[1:])), cols)
        return Operand(random_values(rng, shape, dtype), None, stride)
    sizes = tuple(int(size) for size in rng.choice(EDGES, int(rng.integers(1, 5))))
    tail = int(rng.choice([0, 1, 5, 130]))
    x = random_values(rng, (sum(sizes) + tail, cols), dtype)
    x[sum(sizes) :] = np.nan
    return Operand(x, sizes, stride)
