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
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from octavo import Recipe
from octavo.errors import one_of
from octavo.formats import DType
from octavo.recipe_base import GEMMS, Gemm
from octavo_numerics.gemm.bound_report import BoundReport
from octavo_numerics.gemm.elements import F64, first, float64, folded_products, ratio, settled_by_infinities
from octavo_numerics.gemm.norms import NORMS, norm_ratios
from octavo_numerics.gemm.rounding_errors import OUTPUTS, UNDERFLOW, Accumulation, accumulation_error


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
        return NORMS[name].k * math.hypot(self.rho, self.alpha)

    def check(
        self, actual: Any, a: Any, b: Any, *, zero_mean: bool = True, folding: tuple[Any, Any] | None = None
    ) -> BoundReport:
        """Compare `actual` [R, C] with a b^T for the operands a [R, k], b [C, k] of one group.

        Any dtypes that convert to float64. `zero_mean=False` is for data with a mean, of few distinct values or with
        rows of different magnitude: it leaves T2 out, and T1 takes `c_of_any_data`. `folding`: a and b are MX values,
        `actual` is the product of folded ones, and these arrays of a's and b's shapes say by how much the two may
        differ (`folding_bound`). Raises ValueError for shapes that do not fit.
        """
        actual, a, b = (float64(array, name) for array, name in ((actual, "actual"), (a, "a"), (b, "b")))
        if a.shape[1] != self.k or b.shape[1] != self.k:
            raise ValueError(
                f"a has shape {list(a.shape)} and b {list(b.shape)}; the bound is for k={self.k}, their last axis"
            )
        if actual.shape != (a.shape[0], b.shape[0]):
            raise ValueError(f"actual has shape {list(actual.shape)}; give {[a.shape[0], b.shape[0]]}")
        with np.errstate(all="ignore"):
            folded = np.zeros(actual.shape)
            if folding is not None:
                folded = folded_products(a, b, *(float64(part, "folding") for part in folding))
            return self._check(actual, a, b, folded, zero_mean)

    def _check(self, actual: F64, a: F64, b: F64, folded: F64, zero_mean: bool) -> BoundReport:
        label = f"the {self.accumulation} bound for k={self.k}, {self.out_dtype} out"
        if not actual.size:
            return BoundReport(True, 0.0, {}, bound=label)
        expected, magnitude = a @ b.T, np.abs(a) @ np.abs(b).T
        output = OUTPUTS[self.out_dtype]
        c = self.c if zero_mean else self.c_of_any_data
        underflow = output.subnormal / 2 + self.k * UNDERFLOW
        floor = np.where(magnitude + folded > 0, underflow, 0.0)
        allowed = self.unit * np.abs(expected) + c * magnitude + floor + (1 + self.unit + c) * folded
        error = np.abs(actual - expected)
        settled, accepted = settled_by_infinities(actual, expected, magnitude, allowed, output.largest)
        ratios = np.where(settled, np.where(accepted, 0.0, np.inf), ratio(error, allowed))
        t1 = float(ratios.max())
        where = first(ratios == t1)
        first_bad = first(ratios > 1)

        t2: dict[str, float] = {}
        if zero_mean:
            squares = (np.where(settled, 0.0, part**2) for part in (error, expected, folded))
            t2, bad = norm_ratios(*squares, floor=underflow, spread=math.hypot(self.rho, self.alpha), k=self.k)
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
    one_of("gemm", gemm, GEMMS)
    one_of("out_dtype", out_dtype, tuple(OUTPUTS))
    one_of("accumulation", accumulation, get_args(Accumulation))
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
    c, alpha = accumulation_error(accumulation, k)
    output = OUTPUTS[out_dtype]
    return ErrorBound(k, out_dtype, accumulation, output.unit, output.rho, c, alpha)
