"""Problems for the grouped GEMMs: operands in the native layout, and what a result must be. numpy alone; not tests.

Operands are quantized by the definition (octavo_numerics). What no layout defines is poison: rows past the sum, panels
that no group has, memory between the rows of a strided operand.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from cpu_calls import DTYPE, NATIVE, Operand
from expected_planes import expected

from octavo import HighPrecision, QuantizerSpec, Recipe
from octavo_native import Gemm
from octavo_native.gemms import gemm_named
from octavo_numerics import ErrorBound, dequantize, error_bound, quantize

Array = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]
GemmName = Literal["fprop", "dgrad", "wgrad"]

GEMMS: tuple[GemmName, ...] = ("fprop", "dgrad", "wgrad")
SCALINGS = ("delayed", "current", "row", "block", "mxfp8", "nvfp4")
FORMATS = {"nvfp4": (("e2m1", "e2m1"),)}
FP8_FORMATS = (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2"))
LEFT = {"fprop": "x", "dgrad": "dy", "wgrad": "dy"}
RIGHT = {"fprop": "w", "dgrad": "w", "wgrad": "x"}
DIRECTION = {"fprop": ("rowwise", "rowwise"), "dgrad": ("rowwise", "columnwise"), "wgrad": ("columnwise", "columnwise")}

SIZES: dict[str, tuple[int, ...]] = {
    "one group": (130,),
    "one row": (1,),
    "empty groups": (0, 1, 17, 0, 130, 0),
    "around a panel": (127, 128, 129),
    "small": (3, 16, 1, 31, 15),
    "no rows in any group": (0, 0, 0),
    "negative": (-3, 120, 5),
    "past M": (64, 40, (1 << 63) - 1, 7),
}
"""Group sizes, good and bad; bad ones are cut by the plan."""


def bounded(sizes: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """What the plan makes of `sizes`: negative ones count as 0, rows past `rows` are cut off."""
    left, real = rows, []
    for size in sizes:
        real.append(min(max(size, 0), left))
        left -= real[-1]
    return tuple(real)


def rows_for(sizes: tuple[int, ...], tail: int) -> int:
    """M of a problem: the good sizes and `tail` rows more."""
    return sum(size for size in sizes if 0 < size < 1 << 30) + tail


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a layer knows before it has tensors: the arguments of `octavo_native.Gemm` by name.

    scaling None: unquantized operands of `dtype`. `power_of_two`: of the quantizers' fp32 scales.
    """

    gemm: GemmName
    scaling: str | None = None
    dtype: str = "bfloat16"
    left_format: str = "e4m3"
    right_format: str = "e4m3"
    left_square: bool = False
    right_square: bool = False
    hadamard: bool = False
    power_of_two: bool = False
    out_dtype: str = "bfloat16"
    accumulate: bool = False
    fast_accumulation: bool = False
    left_interleave: int = 0
    right_interleave: int = 0

    def __str__(self) -> str:
        kind = self.dtype if self.scaling is None else f"{self.scaling}-{self.left_format}-{self.right_format}"
        flags = ("left_square", "right_square", "hadamard", "power_of_two", "accumulate", "fast_accumulation")
        return "-".join([self.gemm, kind, *(name for name in flags if getattr(self, name)), f"to_{self.out_dtype}"])

    @property
    def native(self) -> Gemm:
        """The native GEMM."""
        fields = {name: value for name, value in vars(self).items() if name != "power_of_two"}
        return gemm_named(**fields)

    @property
    def recipe(self) -> Recipe:
        """A recipe of this scaling; its fast accumulation is the case's."""
        if self.scaling is None:
            return HighPrecision()
        options = {"fast_accumulation": frozenset({self.gemm})} if self.fast_accumulation else {}
        return Recipe._kinds[self.scaling](**options)

    def quantizer(self, side: Literal["left", "right"]) -> QuantizerSpec:
        """The quantizer of one side."""
        role = (LEFT if side == "left" else RIGHT)[self.gemm]
        square_columns = self.gemm == "wgrad" and (self.left_square if side == "left" else self.right_square)
        if square_columns:
            role = "x"
        assert self.scaling is not None
        return QuantizerSpec(
            format=self.left_format if side == "left" else self.right_format,
            scaling=self.scaling,
            role=role,
            square=self.right_square and role == "w",
            square_columns=square_columns,
            hadamard=self.hadamard,
            power_of_two=self.power_of_two and self.scaling in ("current", "row", "block"),
        )


def quantized_cases(gemms: tuple[GemmName, ...] = GEMMS, out_dtype: str = "bfloat16") -> list[Case]:
    """Every scaling with every pair of formats in every GEMM: square weights and Hadamard data too."""
    cases = []
    for gemm in gemms:
        for scaling in SCALINGS:
            for left, right in FORMATS.get(scaling, FP8_FORMATS):
                case = Case(gemm=gemm, scaling=scaling, left_format=left, right_format=right, out_dtype=out_dtype)
                cases.append(case)
                if scaling == "block" and gemm == "wgrad":
                    cases += [replace(case, left_square=True), replace(case, right_square=True)]
                if scaling in ("block", "nvfp4") and gemm != "wgrad":
                    cases.append(replace(case, right_square=True))
                if scaling == "nvfp4" and gemm == "wgrad":
                    cases.append(replace(case, hadamard=True))
    return cases


def unquantized_cases(
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32"), out_dtypes: tuple[str, ...] = ()
) -> list[Case]:
    """Every GEMM of every dtype; results have the dtype of the operands unless `out_dtypes` says others."""
    return [
        Case(gemm=gemm, dtype=dtype, out_dtype=out_dtype)
        for gemm in GEMMS
        for dtype in dtypes
        for out_dtype in out_dtypes or (dtype,)
    ]


@dataclass
class Side:
    """One operand of a call.

    arrays   data, scales, global as the call takes them: bytes, or elements [rows, stride] where not quantized
    values   fp32 of each group, [outer, length]: what is multiplied, the summed axis last
    stride   elements from one row to the next; 0 for quantized operands
    """

    arrays: dict[str, Array]
    values: list[Array]
    stride: int = 0


@dataclass
class Problem:
    """One call of a GEMM on `rows` rows in groups of `sizes`, of which the plan makes `real`."""

    case: Case
    sizes: tuple[int, ...]
    rows: int
    n: int
    k: int
    left: Side
    right: Side
    bias: Array | None = None  # [G, N], or [G, K] of dgrad
    bias_scales: Array | None = None  # [M] fp32
    accumulator: Array | None = None  # [G, N, K], what `out` holds before the call
    real: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.real = bounded(self.sizes, self.rows)

    @property
    def sides(self) -> dict[str, int]:
        """The shape, as calls take it."""
        return {"rows": self.rows, "n": self.n, "k": self.k, "groups": len(self.sizes)}

    @property
    def out_shape(self) -> tuple[int, ...]:
        """[M, N], [M, K] or [G, N, K]."""
        if self.case.gemm == "wgrad":
            return (len(self.sizes), self.n, self.k)
        return (self.rows, self.n if self.case.gemm == "fprop" else self.k)

    def spans(self) -> list[slice]:
        """The rows of each group."""
        ends = np.cumsum(self.real)
        return [slice(int(end - size), int(end)) for end, size in zip(ends, self.real, strict=True)]

    def added(self, group: int) -> tuple[F64, F64] | None:
        """(p, q) with p q^T what a group's product is added to, or None."""
        if self.bias is not None:
            rows = self.spans()[group]
            scales = np.ones(rows.stop - rows.start) if self.bias_scales is None else self.bias_scales[rows]
            return scales.astype(np.float64)[:, None], self.bias[group].astype(np.float64)[:, None]
        if self.accumulator is not None:
            return np.eye(self.n), self.accumulator[group].astype(np.float64).T
        return None

    def complaints(self, out: Array, accumulation: Any = "fp32", *, zero_mean: bool = True) -> list[str]:
        """What of a result [out_shape] is wrong, in words: groups outside the bound, rows that are not +0."""
        found = []
        assert out.shape == self.out_shape
        bits = out.view(np.uint32 if out.dtype.itemsize == 4 else np.uint16)
        for group, (rows, a, b) in enumerate(zip(self.spans(), self.left.values, self.right.values, strict=True)):
            actual = out[group] if self.case.gemm == "wgrad" else out[rows]
            if self.case.gemm == "wgrad" and rows.start == rows.stop:
                kept = np.zeros_like(actual) if self.accumulator is None else self.accumulator[group]
                if (bits[group] != kept.view(bits.dtype)).any():
                    found.append(f"group {group} has no rows and its gradient is not what it was, or not +0")
                continue
            report = self._bound(a.shape[1], accumulation, group, actual, a, b, zero_mean)
            if not report.passed:
                found.append(f"group {group} of {len(a)} x {len(b)}: {report.describe()}")
        if self.case.gemm != "wgrad" and bits[sum(self.real) :].any():
            found.append(f"rows from {sum(self.real)} on belong to no group and are not +0")
        return found

    def _bound(
        self, length: int, accumulation: Any, group: int, actual: Array, a: Array, b: Array, zero_mean: bool
    ) -> Any:
        case = self.case
        bound: ErrorBound = error_bound(
            case.recipe,
            length,
            gemm=case.gemm,
            out_dtype=case.out_dtype,
            accumulation=accumulation,
        )
        # T2 presumes some 64 independent products; of Hadamard data the real rows count
        zero_mean = zero_mean and (self.real[group] if case.hadamard else length) >= 64
        more = self.added(group)
        if more is not None:
            # one sum more, written as products: the bound is that of length + 1
            longer = error_bound(
                case.recipe,
                length + 1,
                gemm=case.gemm,
                out_dtype=case.out_dtype,
                accumulation=accumulation,
            )
            a, b = np.concatenate([a, more[0]], axis=1), np.concatenate([b, more[1]], axis=1)
            bound = replace(longer, k=a.shape[1])
            zero_mean = False
        return bound.check(actual, a, b, zero_mean=zero_mean)


def random_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Bell-shaped values of `dtype`, of magnitude 1."""
    return rng.standard_normal(shape, dtype=np.float32).astype(DTYPE[dtype])


def _memory(values: Array, stride: int) -> Array:
    """[rows, cols] with its rows `stride` apart, NaN between them."""
    wide = np.full((values.shape[0], stride), np.nan, dtype=values.dtype)
    wide[:, : values.shape[1]] = values
    return wide


def _group_values(values: Array, sizes: tuple[int, ...], columnwise: bool) -> list[Array]:
    """Each group's rows as [outer, summed]: transposed where the GEMM sums along rows."""
    ends = np.cumsum(sizes)
    parts = [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return [part.T if columnwise else part for part in parts]


def _side(
    case: Case, side: Literal["left", "right"], values: Array, real: tuple[int, ...], stride: int, scale: Array | None
) -> Side:
    """One operand from its values [M, C] or [G, N, C]."""
    stacked = values.ndim == 3
    columnwise = DIRECTION[case.gemm][side == "right"] == "columnwise"
    direction = "columnwise" if columnwise else "rowwise"
    sizes = (values.shape[1],) * values.shape[0] if stacked else real
    if case.scaling is None:
        flat = values.reshape(-1, values.shape[-1])
        stride = max(stride, flat.shape[1])
        exact = flat.astype(np.float32)
        return Side({"data": _memory(flat, stride)}, _group_values(exact, sizes, columnwise), stride)
    spec = case.quantizer(side)
    group_sizes = None if stacked else np.array(real, dtype=np.int64)
    more = {"scale": scale} if case.scaling == "delayed" else {}
    with np.errstate(all="ignore"):
        q = quantize(values, spec, group_sizes, **more)
        exact = dequantize(q, direction).reshape(-1, values.shape[-1])
    op = Operand(values, None if stacked else real)
    arrays = {
        {"codes": "data"}.get(name, name): made
        for name, made in expected(q, spec, op, direction, NATIVE[direction], values.shape[-1]).items()
    }
    if columnwise and spec.hadamard:
        sizes = tuple(-(-size // 16) * 16 for size in sizes)
    return Side(arrays, _group_values(exact, sizes, columnwise))


def make_problem(
    rng: np.random.Generator,
    case: Case,
    sizes: tuple[int, ...],
    n: int,
    k: int,
    *,
    tail: int = 0,
    left: Array | None = None,
    right: Array | None = None,
    left_stride: int = 0,
    right_stride: int = 0,
    bias: str | None = None,
    bias_scales: bool = False,
) -> Problem:
    """A problem on random values, or on `left` and `right` ([M, C] or [G, N, K]) where given; the tail is NaN.

    bias         dtype of a bias [G, N] (dgrad: [G, K]), None for none
    bias_scales  with a random factor for each row
    Strides count elements and are for unquantized operands; 0 means contiguous.
    """
    rows, groups = rows_for(sizes, tail), len(sizes)
    real = bounded(sizes, rows)
    shapes = {"x": (rows, k), "w": (groups, n, k), "dy": (rows, n)}

    def values_of(role: str, given: Array | None) -> Array:
        values = random_values(rng, shapes[role], case.dtype) if given is None else given.copy()
        assert values.shape == shapes[role]
        if role != "w":
            values[sum(real) :] = np.nan
        return values

    scale = np.exp2(rng.uniform(-1, 6, groups)).astype(np.float32)
    problem = Problem(
        case,
        sizes,
        rows,
        n,
        k,
        _side(case, "left", values_of(LEFT[case.gemm], left), real, left_stride, scale),
        _side(case, "right", values_of(RIGHT[case.gemm], right), real, right_stride, scale[::-1].copy()),
    )
    if bias is not None:
        problem.bias = random_values(rng, (groups, problem.out_shape[1]), bias)
    if bias_scales:
        problem.bias_scales = rng.standard_normal(rows).astype(np.float32)
    if case.accumulate:
        problem.accumulator = random_values(rng, problem.out_shape, case.out_dtype)
    return problem
