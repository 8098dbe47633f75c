"""Inputs that tell right from nearly right: value classes, group sizes, one array that holds several classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo.formats import FORMAT_MAX, DType, Format

Array = npt.NDArray[Any]
Rng = np.random.Generator

INTERESTING_SIZES = (0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129)
"""Group sizes on both sides of every block and tile edge."""

DTYPES: dict[DType, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}

_LARGEST: dict[DType, float] = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0, "float32": 3.4028234663852886e38}

_CODE_DTYPES: dict[Format, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def _gauss(rng: Rng, shape: Sequence[int], _format: Format, _dtype: DType) -> Array:
    return rng.standard_normal(shape)


def _zeros(rng: Rng, shape: Sequence[int], _format: Format, _dtype: DType) -> Array:
    return np.where(rng.random(shape) < 0.5, 0.0, -0.0)


def _ties(rng: Rng, shape: Sequence[int], code_format: Format, _dtype: DType) -> Array:
    """Midpoints of neighbouring codes, with the largest code in most blocks so that power-of-two scales are 1."""
    bits = 4 if code_format == "e2m1" else 8
    codes = np.arange(2 ** (bits - 1), dtype=np.uint8).view(_CODE_DTYPES[code_format]).astype(np.float64)
    grid = np.unique(codes[np.isfinite(codes)])
    midpoints = (grid[:-1] + grid[1:]) / 2
    values = rng.choice(midpoints, size=tuple(shape)) * rng.choice([-1.0, 1.0], size=tuple(shape))
    return np.where(rng.random(shape) < 0.1, FORMAT_MAX[code_format], values)


def _edges(rng: Rng, shape: Sequence[int], code_format: Format, dtype: DType) -> Array:
    """In most blocks the largest is the largest code times a power of two, or the next number of `dtype` above or
    below that: where the rules of scales turn, and logarithms of fp32 do not tell the three apart."""
    of_rows = (*shape[:-1], 1)
    power = np.exp2(rng.integers(-6 if dtype == "float16" else -24, 1, of_rows))
    largest = FORMAT_MAX[code_format] * power
    ulp = np.exp2(np.floor(np.log2(largest))) * float(ml_dtypes.finfo(DTYPES[dtype]).eps)  # type: ignore[no-untyped-call]
    edge = (largest + ulp * rng.integers(-1, 2, of_rows)) * rng.choice([-1.0, 1.0], size=tuple(shape))
    return np.where(rng.random(shape) < 0.1, edge, largest * rng.uniform(-0.5, 0.5, shape))


def _outliers(rng: Rng, shape: Sequence[int], _format: Format, dtype: DType) -> Array:
    big = 1e3 if dtype == "float16" else 1e5
    return rng.standard_normal(shape) * np.where(rng.random(shape) < 0.005, big, 1.0)


def _positive(rng: Rng, shape: Sequence[int], _format: Format, _dtype: DType) -> Array:
    return 1.0 + rng.standard_normal(shape)


def _huge(rng: Rng, shape: Sequence[int], _format: Format, dtype: DType) -> Array:
    top = 6.5e4 if dtype == "float16" else 3.3e38
    return top * rng.uniform(-1.0, 1.0, shape)


def _wide(rng: Rng, shape: Sequence[int], _format: Format, dtype: DType) -> Array:
    reach = 12 if dtype == "float16" else 60
    return rng.standard_normal(shape) * np.exp2(rng.uniform(-reach, reach, shape))


def _subnormal(rng: Rng, shape: Sequence[int], _format: Format, dtype: DType) -> Array:
    smallest = 6e-8 if dtype == "float16" else 1e-41 if dtype == "bfloat16" else 1.5e-45
    return rng.choice([-1.0, 1.0], size=tuple(shape)) * smallest * np.exp2(rng.uniform(-1.0, 14.0, shape))


def _nonfinite(rng: Rng, shape: Sequence[int], _format: Format, _dtype: DType) -> Array:
    values = rng.standard_normal(shape)
    spoiled = rng.random(shape) < max(2.0 / max(values.size, 1), 0.003)
    return np.where(spoiled, rng.choice([np.nan, np.inf, -np.inf], size=tuple(shape)), values)


CLASSES: dict[str, Callable[[Rng, Sequence[int], Format, DType], Array]] = {
    "gauss": _gauss,
    "zeros": _zeros,
    "ties": _ties,
    "edges": _edges,
    "outliers": _outliers,
    "positive": _positive,
    "huge": _huge,
    "wide": _wide,
    "subnormal": _subnormal,
    "nonfinite": _nonfinite,
}
"""Value classes by name. Subnormal and non-finite inputs have tests of their own, so that a gap can name them."""

NORMAL_CLASSES = tuple(name for name in CLASSES if name not in ("subnormal", "nonfinite"))


def draw(rng: Rng, shape: Sequence[int], dtype: DType, name: str = "gauss", code_format: Format = "e4m3") -> Array:
    """An array of one class, rounded once to `dtype`; values past its largest finite one are clipped, not Inf."""
    with np.errstate(over="ignore", under="ignore"):
        values = CLASSES[name](rng, shape, code_format, dtype)
        top = _LARGEST[dtype]
        if not (np.max(values, initial=0) <= top and np.min(values, initial=0) >= -top):  # NaN among them, too
            values = np.where(np.isfinite(values), np.clip(values, -top, top), values)
        return np.asarray(values.astype(np.float32).astype(DTYPES[dtype]))


def draw_sizes(rng: Rng, groups: int, rows: int, *, full: bool = False) -> Array:
    """[groups] int32 sizes from `INTERESTING_SIZES` with an empty group (two groups or more), summing to at most
    `rows`; with `full`, to exactly `rows`."""
    sizes = np.zeros(groups, dtype=np.int32)
    left = rows
    order = rng.permutation(groups)
    busy = order[: max(1, groups - 1)]
    for group in busy:
        fitting = [size for size in INTERESTING_SIZES if size <= left]
        sizes[group] = rng.choice(fitting)
        left -= int(sizes[group])
    if full or not sizes.any():
        sizes[busy[0]] += left if full else min(left, 17)
    return sizes


def offsets(sizes: Array) -> Array:
    """[G + 1] int64 row at which each group begins, then the sum."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def draw_mixed(
    rng: Rng, sizes: Array, rows: int, columns: int, dtype: DType, code_format: Format, classes: Sequence[str]
) -> Array:
    """[rows, columns]: each group another class, in a random order; Gaussian rows past the sum."""
    x = draw(rng, (rows, columns), dtype)
    starts = offsets(sizes)
    names = [classes[int(pick)] for pick in rng.permutation(max(len(classes), len(sizes))) % len(classes)]
    for group, size in enumerate(sizes):
        span = slice(int(starts[group]), int(starts[group] + size))
        x[span] = draw(rng, (int(size), columns), dtype, names[group], code_format)
    return x
