"""The match column of GEMMs: sampled outputs beside float64 products of the dequantized operands.

Two groups, the first and the last that have rows; of each the first and last row and column and others at random. What
is allowed is `octavo_numerics.error_bound` for the way in which the backend's card says that it sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.quantizer import HADAMARD_SIZE
from octavo.recipe_base import Gemm
from octavo_bench.harness.engine.protocol import Engine
from octavo_bench.harness.engine.values import F32
from octavo_bench.harness.problem import Prepared
from octavo_bench.harness.recipes import GemmCase
from octavo_bench.harness.shapes import Shape
from octavo_numerics import ErrorBound, error_bound
from octavo_registry import Plan

_ROWS, _COLS = 32, 64


@dataclass(frozen=True)
class Sample:
    """Some outputs of one group, [R, C], and the operands that they are made of, [R, k] and [C, k]."""

    group: int
    actual: F32
    a: F32
    b: F32


@dataclass(frozen=True)
class Pending:
    """Samples on the host that wait for their comparison: float64 takes long enough for a GPU's clocks to fall."""

    samples: tuple[Sample, ...]
    bounds: tuple[ErrorBound, ...]

    def judged(self) -> str:
        """`in bound 0.41` with the largest error over its bound, or `differs: ...`."""
        worst = 0.0
        for sample, bound in zip(self.samples, self.bounds, strict=True):
            report = bound.check(*_evened(sample))
            if not report.passed:
                return f"differs: group {sample.group} {report.describe()}"
            worst = max(worst, report.t1, *report.t2.values())
        return f"in bound {worst:.2f}" if self.samples else "not checked: no group has rows"


def _evened(sample: Sample) -> tuple[F32, F32, F32]:
    """The sample with rows and columns of about one magnitude, which the norms of an error bound presume.

    Multiplied by powers of two: roundings stay what they are.
    """
    down, across = _power_of_two(sample.a), _power_of_two(sample.b)
    return sample.actual * down * across.T, sample.a * down, sample.b * across


def _power_of_two(rows: F32) -> F32:
    """For each row what brings its root mean square near 1; 1 for a row of zeros or with an infinity or NaN."""
    size = np.sqrt(np.mean(rows.astype(np.float64) ** 2, axis=1, keepdims=True))
    usual = np.isfinite(size) & (size > 0)
    return np.where(usual, np.exp2(-np.round(np.log2(np.where(usual, size, 1.0)))), 1.0).astype(np.float32)


def pending_match(prepared: Prepared, case: GemmCase, sizes: Sequence[int], result: Any, seed: int) -> Pending:
    """Samples of `result`, which the GEMM made of the first set of operands; an accumulator has to have been zero."""
    plan: Plan = getattr(prepared.plan, case.gemm)
    how = "fp32" if plan.capability is None else plan.capability.accumulation
    left, right = prepared.values(case.gemm, 0), prepared.values(case.gemm, 1)
    draw = np.random.default_rng(seed)
    samples = [_sample(prepared, case, sizes, group, (result, left, right), draw) for group in sampled_groups(sizes)]
    bounds = [
        error_bound(case.recipe, one.a.shape[1], gemm=case.gemm, out_dtype=case.out_dtype, accumulation=how)
        for one in samples
    ]
    return Pending(tuple(samples), tuple(bounds))


def sampled_groups(sizes: Sequence[int]) -> list[int]:
    """The first and the last group with rows."""
    filled = [group for group, size in enumerate(sizes) if size]
    return sorted({filled[0], filled[-1]}) if filled else []


def _sample(
    prepared: Prepared,
    case: GemmCase,
    sizes: Sequence[int],
    group: int,
    arrays: tuple[Any, Any, Any],
    draw: np.random.Generator,
) -> Sample:
    depth = _wgrad_rows(prepared, sizes, group) if case.gemm == "wgrad" else (0, 0)
    place = Place(case.gemm, group, sizes, depth)
    return sample_at(prepared.engine, prepared.shape, place, arrays, draw)


@dataclass(frozen=True, slots=True)
class Place:
    """Where outputs are sampled. depth: where the group's rows stand in the operands of a wgrad."""

    gemm: Gemm
    group: int
    sizes: Sequence[int]
    depth: tuple[int, int]


def sample_at(
    engine: Engine, shape: Shape, place: Place, arrays: tuple[Any, Any, Any], draw: np.random.Generator
) -> Sample:
    """Some outputs of one group, of a result and the left and the right operand that it is made of."""
    result, left, right = arrays
    group, sizes = place.group, place.sizes
    start = sum(sizes[:group])
    if place.gemm == "wgrad":
        rows, cols = _some(shape.n, _ROWS, draw), _some(shape.k, _COLS, draw)
        depth = slice(*place.depth)
        a = engine.take(left[depth], rows, 1)
        b = engine.take(right[depth], cols, 1)
        actual = engine.take(engine.take(result[group], rows, 0), cols, 1)
        return Sample(group, engine.host(actual), engine.host(a).T, engine.host(b).T)
    rows = _some(sizes[group], _ROWS, draw) + start
    forward = place.gemm == "fprop"
    cols = _some(shape.n if forward else shape.k, _COLS, draw)
    b = engine.host(engine.take(right[group], cols, 0 if forward else 1))
    actual = engine.take(engine.take(result, rows, 0), cols, 1)
    return Sample(group, engine.host(actual), engine.host(engine.take(left, rows, 0)), b if forward else b.T)


def _wgrad_rows(prepared: Prepared, sizes: Sequence[int], group: int) -> tuple[int, int]:
    """Where a group's rows stand in column data; Hadamard data pad each group to 16 rows."""
    plan = prepared.plan.quantize_x
    spec = None if plan is None else plan.request.quantizer
    step = HADAMARD_SIZE if spec is not None and spec.hadamard else 1
    ends = np.cumsum([-(-size // step) * step for size in sizes])
    return int(ends[group - 1]) if group else 0, int(ends[group])


def _some(count: int, most: int, draw: np.random.Generator) -> npt.NDArray[np.int64]:
    """The first, the last and others of `count`, in order."""
    if count <= most:
        return np.arange(count, dtype=np.int64)
    inner = 1 + draw.choice(count - 2, most - 2, replace=False)
    return np.sort(np.concatenate(([0, count - 1], inner))).astype(np.int64)
