"""T1, element by element: which values infinities and NaN settle, and the ratio of an error to what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo_numerics.gemm.rounding_errors import OUTPUTS

F64 = npt.NDArray[np.float64]


def float64(array: Any, name: str) -> F64:
    """The matrix `array` as float64; ValueError for another rank."""
    values = np.asarray(array)
    if values.ndim != 2:
        raise ValueError(f"{name} has shape {list(values.shape)}; give the matrix of one group")
    with np.errstate(all="ignore"):
        return values.astype(np.float64)


def folded_products(a: F64, b: F64, of_a: F64, of_b: F64) -> F64:
    """The largest difference between a product of folded operands and that of the MX values a and b they stand for."""
    for name, part, operand in (("a", of_a, a), ("b", of_b, b)):
        if part.shape != operand.shape:
            raise ValueError(
                f"folding has shape {list(part.shape)} for {name}, whose shape is {list(operand.shape)}; give one "
                "number per element (octavo_numerics.folding_bound)"
            )
    products: F64 = of_a @ (np.abs(b) + of_b).T + np.abs(a) @ of_b.T
    return products


def ratio(error: F64, allowed: F64) -> F64:
    """error / allowed with 0 / 0 = 0 and NaN, which no bound admits, as infinity."""
    ratios = np.divide(error, allowed, out=np.full_like(error, np.inf), where=allowed > 0)
    ratios[(allowed == 0) & (error == 0)] = 0.0
    ratios[np.isnan(ratios)] = np.inf
    return ratios


def settled_by_infinities(
    actual: F64, expected: F64, magnitude: F64, allowed: F64, largest: float
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Two masks: elements that infinities or NaN settle, and those of them that are right."""
    finite = np.isfinite(expected) & np.isfinite(magnitude)
    same = np.where(np.isnan(expected), np.isnan(actual), actual == expected)
    sums_overflow = finite & (magnitude > OUTPUTS["float32"].largest)
    result_overflows = finite & (np.abs(expected) + allowed > largest)
    infinite = np.isinf(actual) & (np.signbit(actual) == np.signbit(expected))
    settled = ~finite | sums_overflow | (result_overflows & infinite)
    return settled, np.where(finite, True, same)


def first(mask: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
    """(row, column) of the first True; None if there is none."""
    if not mask.any():
        return None
    row, column = np.unravel_index(int(mask.argmax()), mask.shape)
    return int(row), int(column)
