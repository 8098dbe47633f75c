"""error_bound: the tolerance of a GEMM, derived from its recipe, its length and how it sums.

A GEMM is compared on its own, apart from quantization: both sides take the same dequantized operands A [R, K] and
B [C, K]. With C = A B^T and S = |A| |B|^T in float64 and e = actual - C:

T1, each element:  |e| <= u_out |C| + c S.
    The first term is the one rounding of the result: half a unit in the last place is at most 2^-p |C| for a
    significand of p bits (Higham, "Accuracy and Stability of Numerical Algorithms", section 2.1). The second is the
    summation: each partial sum is at most S, and each of its roundings at most u S. In fp32, K independent roundings
    of zero mean leave sqrt(K) of them (Higham and Mary, 2019), and 4 standard deviations are allowed:
    c = 4 sqrt(K) 2^-24. Products that are alike, or small beside their sum, are rounded alike, so that data without
    zero mean may need all K of them: c = K 2^-24 where that is more (Higham, section 3.1). Hopper's tensor cores
    truncate instead: bf16 products at 2^-23 of the running sum once for each 16 along K, and once for the products
    themselves; FP8 products in a 14-bit accumulator, 2^-9 over one promotion interval of at most 128, and
    2^-8 K / 128 where nothing is promoted. An interval that is begun counts whole.

T2, the norm of each row, column, 8x8 tile and the whole, for zero-mean data:
    ||e|| / ||C|| <= k sqrt(rho^2 + alpha^2).
    rho is the root mean square of the output rounding. A significand m in [1, 2), distributed as 1 / m (Benford), is
    rounded with an error uniform in half a unit: rho = 2^-p sqrt((3 / 8) / (3 ln 2)) = 0.4247 * 2^-p,
    1.66e-3 for bfloat16, 2.07e-4 for float16; 0 for float32, whose rounding is the accumulator's own. alpha is the
    root mean square of the summation for independent zero-mean terms, ||S|| being about sqrt(K) ||C||. In fp32 no
    partial sum is expected to exceed the last, so K sums rounded one by one, and K products that together weigh as
    much as one sum, leave alpha = rho32 sqrt(K + 1) with rho32 = 0.4247 * 2^-24; blocked orders and FMA do better.
    Hopper's are fits (docs/numerics). bf16: truncating K / 16 running sums, of which the average is half of the last,
    takes 1.3e-9 K of it, 1.2e-9 K measured; below that lie the products of one step, cut at the largest, 3.5e-7.
    k allows for chance. The squared norm of n elements scatters by about 2 / sqrt(n) of its mean (Gaussian C, errors
    uniform), the norm by half of that, so k = 1.2 for the whole needs n >= 1024, k = 1.4 for a row n >= 256, and
    k = 2 for a column n >= 64 and for a tile, each six standard deviations; smaller ones are not judged by T2. A tile's
    ||e|| is without its largest error, which T1 judges alone. Hopper truncates toward zero: where most products of an
    element have one sign, so have the errors of its running sum, and they add up instead of cancelling. One honest
    element in 10^6 errs like 60 others, so that whole tiles of honest FP8 sums passed 2.8, and 1.33 without that
    element, the worst of 14 million. Tiles for K < 8, which a few numbers of A and B decide, are not judged.

T2 finds what T1 cannot: a scale wrong by 2 %, an output rounded toward zero, a tile of the previous step. It presumes
data of zero mean and comparable magnitude and independent products, about 64 of them or more: a Hadamard run with one
real row is 16 equal products, and honest sums of it pass 1.8 times the bound. `zero_mean=False` leaves T2 out.

Folded operands (`MXFP8(products="folded")`) can be judged by the MX values A and B that they stand for. With
|A' - A| <= d and |B' - B| <= f for each element (`folding_bound` derives both), A' B'^T - A B^T = (A' - A) B^T +
A (B' - B)^T + (A' - A)(B' - B)^T, so that each sum differs by at most F = d |B|^T + |A| f^T + d f^T, and |C'| and S' by
at most as much from |C| and S: T1 allows (1 + u_out + c) F more, and T2 (1 + limit) ||F||.

Both allow half of the least subnormal of the output type for each element with S > 0 (underflow has an absolute
error), and half of fp32's for each of the K products, which fp32 rounds one by one. Where S is 0 the result must be 0.
Where |C| may pass the output's (or S the accumulator's) largest value, an infinity of C's sign (where S does: anything)
is accepted; where C is NaN or infinite the result must be the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from octavo import Recipe
from octavo.formats import DType
from octavo.recipe_base import GEMMS, Gemm

Accumulation = Literal["fp32", "hopper_bf16", "hopper_fp8_promoted", "hopper_fp8"]
"""How a GEMM sums; what a backend's capability card states.

fp32                 fp32 sums, fused or not, in any order
hopper_bf16          bf16 products on Hopper's tensor cores
hopper_fp8_promoted  FP8 products, promoted to fp32 at least every 128 along K
hopper_fp8           FP8 products, promoted likewise unless the recipe's `fast_accumulation` lets this GEMM do without
"""

F64 = npt.NDArray[np.float64]

_PROMOTION = 128
_TILE = 8
_UNDERFLOW = 2.0**-150
"""What a subnormal fp32 product is off by at most."""
_RHO_FP32 = 0.4247 * 2.0**-24
_ALPHA_PROMOTED = 1.9e-4


@dataclass(frozen=True, slots=True)
class _Output:
    unit: float
    rho: float
    subnormal: float
    largest: float


_OUTPUTS: dict[DType, _Output] = {
    "bfloat16": _Output(2.0**-8, 1.66e-3, 2.0**-133, 2.0**128 * (1 - 2.0**-8)),
    "float16": _Output(2.0**-11, 2.07e-4, 2.0**-24, 65504.0),
    "float32": _Output(2.0**-24, 0.0, 2.0**-149, 2.0**128 * (1 - 2.0**-24)),
}


@dataclass(frozen=True, slots=True)
class _Norm:
    """T2 for one way of cutting the result: k, the least number of elements it is meant for, and whether the largest
    error of each cut is left to T1.
    """

    k: float
    least: int
    but_the_largest: bool = False


_NORMS: dict[str, _Norm] = {
    "whole": _Norm(1.2, 1024),
    "row": _Norm(1.4, 256),
    "column": _Norm(2.0, 64),
    "tile": _Norm(2.0, _TILE * _TILE, but_the_largest=True),
}


def _accumulation_error(accumulation: Accumulation, k: int) -> tuple[float, float]:
    """(c, alpha) of a sum of `k` products."""
    if accumulation == "fp32":
        return 4 * math.sqrt(k) * 2.0**-24, _RHO_FP32 * math.sqrt(k + 1)
    if accumulation == "hopper_bf16":
        return (math.ceil(k / 16) + 1) * 2.0**-23, math.hypot(1.2e-9 * k, 3.5e-7)
    if accumulation == "hopper_fp8_promoted":
        return 2.0**-9, _ALPHA_PROMOTED
    return max(2.0**-8 * k / _PROMOTION, 2.0**-9), max(2.6e-5 * math.sqrt(k), _ALPHA_PROMOTED)


@dataclass(frozen=True, slots=True)
class BoundReport:
    """What a comparison found. Ratios are error / bound: at most 1 passes.

    passed     every ratio is at most 1
    t1         the largest ratio of T1 over the elements
    t2         the largest ratio of T2 by "whole", "row", "column", "tile"; those that were not judged are absent
    where      (row, column) of the element with the largest T1 ratio; None for an empty result
    first_bad  (row, column) of the first element that fails T1, or of the first element of what fails T2
    actual, expected, allowed   the values at `first_bad` (else at `where`), and T1's bound there
    """

    passed: bool
    t1: float
    t2: dict[str, float]
    where: tuple[int, int] | None = None
    first_bad: tuple[int, int] | None = None
    actual: float = 0.0
    expected: float = 0.0
    allowed: float = 0.0
    bound: str = field(default="", repr=False)

    def describe(self) -> str:
        """One sentence: the verdict, the element and both values, and every maximum."""
        maxima = ", ".join(f"{name} {ratio:.3g}" for name, ratio in {"T1": self.t1, **self.t2}.items())
        if self.passed:
            return f"within {self.bound}: error/bound maxima {maxima}"
        if self.t1 > 1:
            what = "element"
        else:
            worst = max(self.t2, key=lambda name: self.t2[name])
            what = f"{worst} (norm {self.t2[worst]:.3g} of its bound) from element"
        return (
            f"outside {self.bound}: {what} {self.first_bad} is {self.actual!r}, expected {self.expected!r} "
            f"within {self.allowed:.3g}; error/bound maxima {maxima}"
        )


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """T1 and T2 of one GEMM (see the module): `check` compares a result with them.

    unit, rho  rounding of the output: largest relative error, root mean square
    c, alpha   the sum's error relative to S, and relative to ||C||
    """

    k: int
    out_dtype: DType
    accumulation: Accumulation
    unit: float
    rho: float
    c: float
    alpha: float

    @property
    def c_of_any_data(self) -> float:
        """`c` where roundings need not be independent."""
        return max(self.c, self.k * 2.0**-24) if self.accumulation == "fp32" else self.c

    def norm_limit(self, name: Literal["whole", "row", "column", "tile"]) -> float:
        """The largest ||e|| / ||C|| that T2 allows."""
        return _NORMS[name].k * math.hypot(self.rho, self.alpha)

    def check(
        self, actual: Any, a: Any, b: Any, *, zero_mean: bool = True, folding: tuple[Any, Any] | None = None
    ) -> BoundReport:
        """Compare `actual` [R, C] with a b^T for the operands a [R, k], b [C, k] of one group.

        Any dtypes that convert to float64. `zero_mean=False` is for data with a mean, of few distinct values or with
        rows of different magnitude: it leaves T2 out, and T1 takes `c_of_any_data`. `folding`: a and b are MX values,
        `actual` is the product of folded ones, and these arrays of a's and b's shapes say by how much the two may
        differ (`folding_bound`). Raises ValueError for shapes that do not fit.
        """
        actual, a, b = (_float64(array, name) for array, name in ((actual, "actual"), (a, "a"), (b, "b")))
        if a.shape[1] != self.k or b.shape[1] != self.k:
            raise ValueError(
                f"a has shape {list(a.shape)} and b {list(b.shape)}; the bound is for k={self.k}, their last axis"
            )
        if actual.shape != (a.shape[0], b.shape[0]):
            raise ValueError(f"actual has shape {list(actual.shape)}; give {[a.shape[0], b.shape[0]]}")
        with np.errstate(all="ignore"):
            folded = np.zeros(actual.shape)
            if folding is not None:
                folded = _folded_products(a, b, *(_float64(part, "folding") for part in folding))
            return self._check(actual, a, b, folded, zero_mean)

    def _check(self, actual: F64, a: F64, b: F64, folded: F64, zero_mean: bool) -> BoundReport:
        label = f"the {self.accumulation} bound for k={self.k}, {self.out_dtype} out"
        if not actual.size:
            return BoundReport(True, 0.0, {}, bound=label)
        expected, magnitude = a @ b.T, np.abs(a) @ np.abs(b).T
        output = _OUTPUTS[self.out_dtype]
        c = self.c if zero_mean else self.c_of_any_data
        underflow = output.subnormal / 2 + self.k * _UNDERFLOW
        floor = np.where(magnitude + folded > 0, underflow, 0.0)
        allowed = self.unit * np.abs(expected) + c * magnitude + floor + (1 + self.unit + c) * folded
        error = np.abs(actual - expected)
        ratio = _ratio(error, allowed)

        settled, accepted = _special(actual, expected, magnitude, allowed, output.largest)
        ratio = np.where(settled, np.where(accepted, 0.0, np.inf), ratio)
        t1 = float(ratio.max())
        where = _first(ratio == t1)
        first_bad = _first(ratio > 1)

        t2: dict[str, float] = {}
        if zero_mean:
            squares = [np.where(settled, 0.0, part**2) for part in (error, expected, folded)]
            t2, bad = self._norms(squares[0], squares[1], squares[2], underflow)
            if first_bad is None:
                first_bad = bad
        shown = first_bad or where
        assert shown is not None
        return BoundReport(
            passed=first_bad is None,
            t1=t1,
            t2=t2,
            where=where,
            first_bad=first_bad,
            actual=float(actual[shown]),
            expected=float(expected[shown]),
            allowed=float(allowed[shown]),
            bound=label,
        )

    def _norms(
        self, error: F64, expected: F64, folded: F64, floor: float
    ) -> tuple[dict[str, float], tuple[int, int] | None]:
        """T2's largest ratios from squared errors, values and what folding may add, and the first element of the worst
        cut that fails.
        """
        rows, cols = error.shape
        cuts: dict[str, tuple[int, int]] = {
            "whole": (rows, cols),
            "row": (1, cols),
            "column": (rows, 1),
            "tile": (_TILE, _TILE),
        }
        t2: dict[str, float] = {}
        worst: tuple[float, tuple[int, int]] | None = None
        for name, (height, width) in cuts.items():
            norm = _NORMS[name]
            if height * width < norm.least or height > rows or width > cols or (name == "tile" and self.k < _TILE):
                continue
            for top in {0, rows % height}:
                for left in {0, cols % width}:
                    e = np.sqrt(_cut_sums(error, height, width, top, left, but_the_largest=norm.but_the_largest))
                    limit = norm.k * math.hypot(self.rho, self.alpha)
                    c = np.sqrt(_cut_sums(expected, height, width, top, left))
                    f = np.sqrt(_cut_sums(folded, height, width, top, left))
                    ratio = _ratio(e, limit * c + (1 + limit) * f + floor * math.sqrt(height * width))
                    largest = float(ratio.max())
                    t2[name] = max(t2.get(name, 0.0), largest)
                    if largest > 1 and (worst is None or largest > worst[0]):
                        i, j = np.unravel_index(int(ratio.argmax()), ratio.shape)
                        worst = largest, (top + int(i) * height, left + int(j) * width)
        return t2, None if worst is None else worst[1]


def _float64(array: Any, name: str) -> F64:
    values = np.asarray(array)
    if values.ndim != 2:
        raise ValueError(f"{name} has shape {list(values.shape)}; give the matrix of one group")
    with np.errstate(all="ignore"):
        return values.astype(np.float64)


def _folded_products(a: F64, b: F64, of_a: F64, of_b: F64) -> F64:
    """The largest difference between a product of folded operands and that of the MX values a and b they stand for."""
    for name, part, operand in (("a", of_a, a), ("b", of_b, b)):
        if part.shape != operand.shape:
            raise ValueError(
                f"folding has shape {list(part.shape)} for {name}, whose shape is {list(operand.shape)}; give one "
                "number per element (octavo_numerics.folding_bound)"
            )
    products: F64 = of_a @ (np.abs(b) + of_b).T + np.abs(a) @ of_b.T
    return products


def _ratio(error: F64, allowed: F64) -> F64:
    """error / allowed with 0 / 0 = 0 and NaN, which no bound admits, as infinity."""
    ratio = np.divide(error, allowed, out=np.full_like(error, np.inf), where=allowed > 0)
    ratio[(allowed == 0) & (error == 0)] = 0.0
    ratio[np.isnan(ratio)] = np.inf
    return ratio


def _special(
    actual: F64, expected: F64, magnitude: F64, allowed: F64, largest: float
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(elements that infinities or NaN settle, those of them that are right)."""
    finite = np.isfinite(expected) & np.isfinite(magnitude)
    same = np.where(np.isnan(expected), np.isnan(actual), actual == expected)
    sums_overflow = finite & (magnitude > _OUTPUTS["float32"].largest)
    result_overflows = finite & (np.abs(expected) + allowed > largest)
    infinite = np.isinf(actual) & (np.signbit(actual) == np.signbit(expected))
    settled = ~finite | sums_overflow | (result_overflows & infinite)
    return settled, np.where(finite, True, same)


def _first(mask: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
    if not mask.any():
        return None
    row, column = np.unravel_index(int(mask.argmax()), mask.shape)
    return int(row), int(column)


def _cut_sums(values: F64, height: int, width: int, top: int, left: int, *, but_the_largest: bool = False) -> F64:
    """Sums over the [height, width] cuts that fit below `top` and right of `left`, each without its largest value if
    so asked.
    """
    values = values[top:, left:]
    down, across = values.shape[0] // height, values.shape[1] // width
    cuts = values[: down * height, : across * width].reshape(down, height, across, width)
    sums: F64 = cuts.sum(axis=(1, 3))
    return np.maximum(sums - cuts.max(axis=(1, 3)), 0.0) if but_the_largest else sums


def error_bound(
    recipe: Recipe,
    k: int,
    *,
    gemm: Gemm = "fprop",
    out_dtype: DType = "bfloat16",
    accumulation: Accumulation = "fp32",
) -> ErrorBound:
    """The bound of `gemm` under `recipe`, over `k` products a sum (K in fprop, N in dgrad, a group's rows in wgrad).

    Source: docs/numerics, "Tolerances for GEMMs"; the module derives it. `accumulation` is what the backend's
    capability states; the recipe decides whether "hopper_fp8" may leave promotion out.

    Raises ValueError for a negative k, an unknown name, or FP8 accumulation of high-precision operands.
    """
    for name, value, known in (
        ("gemm", gemm, GEMMS),
        ("out_dtype", out_dtype, tuple(_OUTPUTS)),
        ("accumulation", accumulation, get_args(Accumulation)),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; give one of {', '.join(known)}")
    if k < 0:
        raise ValueError(f"k={k}; a sum has zero products or more")
    fp8 = accumulation in ("hopper_fp8", "hopper_fp8_promoted")
    if fp8 and not recipe.quantizes(gemm):
        raise ValueError(
            f"accumulation={accumulation!r} sums FP8 products and {gemm} of recipe {recipe.kind!r} is in high "
            "precision; give 'hopper_bf16' or 'fp32'"
        )
    if accumulation == "hopper_fp8" and gemm not in getattr(recipe, "fast_accumulation", ()):
        accumulation = "hopper_fp8_promoted"
    c, alpha = _accumulation_error(accumulation, k)
    output = _OUTPUTS[out_dtype]
    return ErrorBound(k, out_dtype, accumulation, output.unit, output.rho, c, alpha)
