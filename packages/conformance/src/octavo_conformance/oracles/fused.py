"""A backend's fused quantizers: what is asked of them, and the comparison of what they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import octavo_numerics
from octavo_conformance.oracles.checks import assert_same_bits, assert_same_tensor, bits
from octavo_conformance.oracles.functions import Exact, U
from octavo_conformance.oracles.keeping import keeping
from octavo_conformance.oracles.quantizing import arguments_for
from octavo_conformance.problems.case import Case, Measure
from octavo_conformance.problems.inputs import Array, Rng, draw, draw_sizes, offsets

ROWS, FEATURES, GROUPS = 400, 144, 6
"""Shape of these tests: what is quantized has FEATURES columns, one block of 128 and a tail; gated gradients twice."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """[ROWS, C] arrays with NaN past the sum, sizes [GROUPS] with an empty group, and the quantizer's arguments."""

    sizes: Array
    arguments: dict[str, Any]
    rng: Rng
    dtype: Any

    @property
    def total(self) -> int:
        """Rows that belong to a group."""
        return int(self.sizes.sum())

    def rows(self, columns: int) -> Array:
        """Values on both sides of where an activation bends."""
        x = draw(self.rng, (ROWS, columns), self.dtype)
        x *= self.rng.choice(np.array([0.125, 1, 4]), (ROWS, 1)).astype(x.dtype)
        x[self.total :] = np.nan
        return x

    def probs(self) -> Array | None:
        """fp32 [ROWS], or none."""
        if self.rng.random() < 0.3:
            return None
        probs = self.rng.random(ROWS).astype(np.float32)
        probs[self.total :] = np.nan
        return probs

    def vector(self, columns: int) -> Array:
        """[columns], such as a gamma."""
        return draw(self.rng, (columns,), self.dtype)


def draw_inputs(case: Case, rng: Rng, sizes: Array | None = None) -> Inputs:
    """Sizes that leave a tail, and a seed with the number of the first group, or encode scales."""
    sizes = draw_sizes(rng, GROUPS, ROWS - 31) if sizes is None else sizes
    arguments = arguments_for(case.spec, rng, GROUPS)
    if case.spec.stochastic:
        arguments["group_offset"] = int(rng.integers(1, 1000))
    return Inputs(sizes, arguments, rng, case.dtype)


def call(case: Case, inputs: Inputs, columns: int, arrays: list[Array | None], **how: Any) -> tuple[Any, Any]:
    """(the framework's GroupedTensor, its extras) of the case's operation, whose result has `columns`.

    arrays   in front of the sizes, None for an absent one; `how` holds keywords, arrays among them
    """
    plan = case.plan(case.need.op, k=columns, groups=GROUPS)
    given = [_on_device(case, array) for array in arrays]
    keywords = {name: _on_device(case, value) for name, value in (how | inputs.arguments).items() if value is not None}
    result: tuple[Any, Any] = keeping(case, case.need.op, plan.run)(
        *given, case.sizes(inputs.sizes), operand=case.spec.role, **keywords
    )
    return result


def values_alone(case: Case, op: str, inputs: Inputs, columns: int, arrays: list[Array], **how: Any) -> Any:
    """The extras of the operation's function for values, whose result has `columns`; skips where there is none."""
    bound: Any = case.plan(op, k=columns, groups=GROUPS).bound
    if bound.values is None:
        pytest.skip("the answer has no function for values alone: front ends pass codes over")
    keywords = {name: _on_device(case, value) for name, value in how.items()}
    values = keeping(case, f"the values of {op}", bound.values)
    return values(*map(case.array, arrays), case.sizes(inputs.sizes), **keywords)


def _on_device(case: Case, value: Any) -> Any:
    return case.array(value) if isinstance(value, np.ndarray) else value


def assert_near(actual: Array, exact: Exact, what: str, measure: Measure) -> None:
    """Each element is within the exact value's fp32 error and one rounding to its dtype."""
    info: Any = ml_dtypes.finfo(actual.dtype)  # type: ignore[no-untyped-call]
    half_ulp = np.maximum(np.abs(exact.value) * float(info.eps), float(info.smallest_subnormal)) / 2
    allowed = half_ulp * (1 + 4 * U) + exact.error * (1 + float(info.eps))
    error = np.abs(actual.astype(np.float64) - exact.value)
    share = np.where(np.isfinite(error), error / allowed, np.inf)
    if not share.size:
        return
    measure(f"bound.{what}", float(share.max()))
    if share.max() > 1:
        where = tuple(int(index) for index in np.unravel_index(int(share.argmax()), share.shape))
        pytest.fail(
            f"{what}: {float(share.max()):.2f} times its bound at {list(where)}: got {actual[where]}, float64 has "
            f"{exact.value[where]}"
        )


def activated_of(case: Case, inputs: Inputs, extras: Any, columns: int) -> Array:
    """The array that was quantized, in the input's dtype; NaN past the sum says nothing of it."""
    array = getattr(extras, "activated", None)
    assert array is not None, f"the extras of {case.need.op} lack `activated`, which is what was quantized"
    activated = case.numpy(array)
    assert activated.shape == (ROWS, columns), f"activated has shape {activated.shape}, not {(ROWS, columns)}"
    assert activated.dtype.name == case.dtype, f"activated has dtype {activated.dtype}, x has {case.dtype}"
    return activated


def assert_quantized(case: Case, inputs: Inputs, tensor: Any, extras: Any, activated: Array) -> None:
    """Codes, scales and amax are the definition's of the array that the backend says it quantized."""
    assert_same_tensor(case, tensor, octavo_numerics.quantize(activated, case.spec, inputs.sizes, **inputs.arguments))
    amax = getattr(extras, "amax", None)
    if amax is None:
        return
    starts = offsets(inputs.sizes)
    groups = [activated[starts[g] : starts[g + 1]].astype(np.float32) for g in range(GROUPS)]
    expected = np.array([np.abs(group).max(initial=0) for group in groups], np.float32)
    assert_same_bits(case.numpy(amax), expected, "amax")


def assert_column_sums(case: Case, inputs: Inputs, extras: Any, activated: Array, measure: Measure) -> Array:
    """dbias [G, C] is the fp32 sum of each group's rounded rows, within n u of float64; 0 for an empty group."""
    assert getattr(extras, "dbias", None) is not None, "the extras of dact_quantize lack `dbias`"
    dbias = case.numpy(extras.dbias)
    assert dbias.shape == (GROUPS, activated.shape[1]), f"dbias has shape {dbias.shape}"
    assert dbias.dtype == np.float32, f"dbias has dtype {dbias.dtype}; sums of gradients are fp32"
    starts = offsets(inputs.sizes)
    for g in range(GROUPS):
        rows = activated[starts[g] : starts[g + 1]].astype(np.float64)
        allowed = len(rows) * U * np.abs(rows).sum(0)
        error = np.abs(dbias[g].astype(np.float64) - rows.sum(0))
        if np.any(~(error <= allowed)):
            column = int(np.argmax(~(error <= allowed)))
            pytest.fail(
                f"dbias of group {g}, column {column}: got {dbias[g, column]}, float64 has {rows.sum(0)[column]}"
            )
        if len(rows):
            measure("bound.dbias", float((error / np.maximum(allowed, np.finfo(np.float64).tiny)).max()))
    return dbias


def assert_row_products(case: Case, inputs: Inputs, extras: Any, dy: Array, exact: Exact, measure: Measure) -> None:
    """dprobs [M], where a backend makes it, is the sum along a row of dy and the activation, within n u of float64; 0
    past the sum."""
    if getattr(extras, "dprobs", None) is None:
        return
    dprobs, total = case.numpy(extras.dprobs), inputs.total
    assert dprobs.shape == (ROWS,), f"dprobs has shape {dprobs.shape}"
    assert dprobs.dtype == np.float32, f"dprobs has dtype {dprobs.dtype}; sums of gradients are fp32"
    grad = dy[:total].astype(np.float64)
    terms = np.abs(grad * exact.value).sum(1)
    allowed = (np.abs(grad) * exact.error).sum(1) + (dy.shape[1] + 2) * U * terms
    error = np.abs(dprobs[:total].astype(np.float64) - (grad * exact.value).sum(1))
    assert (error <= allowed).all(), f"dprobs of row {int(np.argmax(~(error <= allowed)))} is past its bound"
    assert not dprobs[total:].any(), "dprobs of a row in no group is not 0"
    if total:
        measure("bound.dprobs", float((error / np.maximum(allowed, np.finfo(np.float64).tiny)).max()))


def assert_repeats(first: Array, second: Array, what: str) -> None:
    """Equal bits, NaN included."""
    assert np.array_equal(bits(first), bits(second)), f"{what} of a second run differs"
