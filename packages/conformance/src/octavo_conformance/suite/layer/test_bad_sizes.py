"""Sizes that sum past M, and negative ones: a ValueError from the host, nothing out of bounds on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.quantizer import Operand
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.oracles.layers import run_layer
from octavo_conformance.oracles.quantizing import COLUMNS, GROUPS, ROWS, arguments_for
from octavo_conformance.problems.case import OPERANDS, Case
from octavo_conformance.problems.inputs import Array, Rng, draw
from octavo_conformance.problems.operands import MAIN, RUN_ORDER, SEED, by_definition, draw_problem, to_framework

BAD = (
    [100, 0, ROWS, 7, 0, 1],
    [100, -5, 50, 0, 7, 1],
    [100, 2**31 - 1, 2**31 - 1, 2, 0, 0],
    [100, -(2**31), 0, 0, 0, 1],
)
"""Each is wrong from the second or third group on; the first group's 100 rows are its own in all of them."""


def _unless_refused(case: Case, run: Callable[[list[int]], Array], sizes: list[int]) -> Array | None:
    """run(sizes), or None where the device is the host and said that the sizes do not fit."""
    try:
        return run(list(sizes))
    except ValueError as error:
        if case.target.device.kind != "cpu" or "sizes" not in str(error):
            raise
        return None


@needs("quantize", selections.one_per_scaling)
def test_host_sizes_are_checked_by_quantize(case: Case, rng: Rng) -> None:
    """A list that is negative, or sums past M, is a ValueError that says which (product, promise 2; fault 62)."""
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    for sizes in BAD[:2]:
        with pytest.raises(ValueError, match=r"group_sizes|sum"):
            case.quantize(x, list(sizes), **arguments_for(case.spec, rng, GROUPS))


@needs("layer", selections.few_recipes)
def test_host_sizes_are_checked_by_the_layer(case: Case, rng: Rng) -> None:
    """The same for the layer (faults 12, 61, 62)."""
    problem = draw_problem(rng, case.dtype)
    for sizes in BAD[:2]:
        with pytest.raises(ValueError, match=r"group_sizes|sum"):
            run_layer(case, problem, sizes=list(sizes))


@needs("quantize", selections.one_per_scaling, sizes="device")
def test_device_sizes_are_clamped_by_quantize(case: Case, rng: Rng) -> None:
    """Nothing is raised, nothing crashes, and the groups before the first wrong size are right (fault 61). A CPU's
    memory is the host's, so there a ValueError will do as well."""
    x = draw(rng, (ROWS, COLUMNS), case.dtype)
    arguments = arguments_for(case.spec, rng, GROUPS)
    plan = case.plan("quantize", k=COLUMNS, groups=GROUPS)
    scale = arguments.pop("scale", None)

    def codes(sizes: list[int]) -> Array:
        tensor = plan.run(
            case.array(x),
            case.sizes(np.array(sizes, dtype=np.int64)),
            operand=case.spec.role,
            scale=None if scale is None else case.array(scale),
            **arguments,
        )
        return case.numpy(tensor.rowwise)

    right = codes([100, 0, 0, 0, 0, 0])
    for sizes in BAD:
        actual = _unless_refused(case, codes, sizes)
        if actual is None:
            continue
        assert actual.shape == right.shape, f"sizes {sizes}: shape {actual.shape}, with good sizes {right.shape}"
        assert_same_bits(actual[:100], right[:100], f"codes of the first group with sizes {sizes}")


@needs("gemm", selections.few_gemms, sizes="device")
def test_device_sizes_are_clamped_by_gemms(case: Case, rng: Rng) -> None:
    """The same for the three GEMMs: right before the first wrong size, unchanged shapes, no crash (fault 61)."""
    problem = draw_problem(rng, case.dtype, sizes=np.array([100, 0, 50, 7, 0, 1], dtype=np.int32))
    _, K, N, G = MAIN
    plan = case.plan(case.gemm, k=K, n=N, groups=G)
    if any(layout != "plain" for layout in plan.layouts.values()):
        pytest.skip("operands of these sizes cannot be produced in the backend's own layout")
    quantized = {operand: by_definition(problem, case.recipe, operand, seed=SEED) for operand in OPERANDS}
    used: dict[Operand, Any] = quantized if case.recipe.quantizes(case.gemm) else dict.fromkeys(OPERANDS)

    def result(sizes: list[int]) -> Array:
        on_device = case.sizes(np.array(sizes, dtype=np.int64))
        operands = []
        for name in RUN_ORDER[case.gemm]:
            tensor = used[name]
            operands.append(case.array(problem.of(name)) if tensor is None else to_framework(case, tensor, on_device))
        return case.numpy(plan.run(*operands, on_device))

    right = result([int(size) for size in problem.sizes])
    for sizes in BAD:
        actual = _unless_refused(case, result, sizes)
        if actual is None:
            continue
        assert actual.shape == right.shape, f"sizes {sizes}: shape {actual.shape}, with good sizes {right.shape}"
        mine, theirs = (actual[0], right[0]) if case.gemm == "wgrad" else (actual[:100], right[:100])
        assert_same_bits(mine, theirs, f"{case.gemm} of the first group with sizes {sizes}")
