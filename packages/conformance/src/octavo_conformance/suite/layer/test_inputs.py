"""What a call is given belongs to the caller, and so does its result: both keep their bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.grouped_tensor import PLAIN
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits, assert_same_tensor
from octavo_conformance.oracles.keeping import assert_kept, copies
from octavo_conformance.oracles.quantizing import COLUMNS, GROUPS, ROWS, arguments_for, as_given, sizes_for
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import Array, Rng, draw
from octavo_conformance.problems.operands import MAIN, RUN_ORDER, by_definition, draw_problem, gemm_call, gemm_operand
from octavo_numerics import quantize


def _quantize(case: Case, rng: Rng, x: Array, sizes: Array | None, groups: int) -> None:
    arguments = as_given(case, arguments_for(case.spec, rng, groups))
    given = {
        "x": case.array(x),
        "group_sizes": None if sizes is None else case.sizes(sizes),
        "scale": arguments.get("scale"),
    }
    before = copies(case, given)
    with case.admitted(k=x.shape[-1]):
        case.bridge.quantize(given["x"], case.spec, given["group_sizes"], backend=case.backend, **arguments)
    assert_kept(case, given, before, "quantize")


@needs("quantize", selections.one_per_scaling)
def test_quantize_writes_no_input(case: Case, rng: Rng) -> None:
    """x, its scales and the group sizes are as they were: the layer's other operations read them, too."""
    _quantize(case, rng, draw(rng, (ROWS, COLUMNS), case.dtype), sizes_for(rng), GROUPS)


@needs("quantize", selections.stacked)
def test_quantize_writes_no_weight(case: Case, rng: Rng) -> None:
    """A parameter is the optimizer's to change."""
    _, K, N, groups = MAIN
    _quantize(case, rng, draw(rng, (groups, N, K), case.dtype), None, groups)


@needs("gemm", selections.gemms)
def test_gemm_writes_no_input(case: Case, rng: Rng) -> None:
    """Codes, scales, unquantized operands, group sizes, a bias and its factors are as they were: a layer's forward and
    backward share w, x and the sizes. Operands in a layout of the backend's own are its own business."""
    problem = draw_problem(rng, case.dtype)
    _, N, K = problem.w.shape
    plan = case.plan(case.gemm, k=K, n=N, groups=len(problem.sizes))
    quantizes = case.recipe.quantizes(case.gemm)
    operands: dict[str, Any] = {}
    for name in RUN_ORDER[case.gemm]:
        quantized = by_definition(problem, case.recipe, name) if quantizes else None
        operands[name] = gemm_operand(case, plan, problem, name, quantized)
    sizes = case.sizes(problem.sizes)
    given = {name: operand for name, operand in operands.items() if plan.layouts.get(name, PLAIN) == PLAIN}
    given["group_sizes"] = sizes
    rest = {}
    if case.gemm == "fprop":
        scales = rng.random(len(problem.x), dtype=np.float32)
        rest = {"bias": case.array(problem.bias), "bias_scales": case.array(scales)}
    given |= rest
    before = copies(case, given)
    plan.run(*operands.values(), sizes, **rest)
    assert_kept(case, given, before, case.gemm)


@needs("quantize", selections.one_per_scaling)
def test_codes_outlive_the_next_call(case: Case, rng: Rng) -> None:
    """Codes are their caller's: a layer keeps them from its forward to its backward, and other layers quantize in
    between. An array whose values have changed, as an optimizer changes a weight's in place, has new codes."""
    sizes = sizes_for(rng)
    old, new = (draw(rng, (ROWS, COLUMNS), case.dtype) for _ in range(2))
    arguments = arguments_for(case.spec, rng, GROUPS)
    plan = case.plan("quantize", k=COLUMNS, groups=GROUPS)
    how = {"operand": case.spec.role, **as_given(case, arguments)}
    x = case.array(old.copy())
    first = plan.run(x, case.sizes(sizes), **how)
    if case.writes_arrays:
        x[...] = case.array(new)
    else:
        x = case.array(new)
    second = plan.run(x, case.sizes(sizes), **how)
    for tensor, values, what in ((first, old, "codes after another call: "), (second, new, "codes of new values: ")):
        assert_same_tensor(case, tensor, quantize(values, case.spec, sizes, **arguments), what)


@needs("gemm", selections.few_gemms)
def test_a_result_outlives_the_next_call(case: Case, rng: Rng) -> None:
    """A result without `out` is its caller's, and not memory that the next call of these shapes writes over."""
    results = []
    for problem in (draw_problem(rng, case.dtype) for _ in range(2)):
        run, operands = gemm_call(case, problem)
        y = run(*operands, case.sizes(problem.sizes))
        results.append((y, np.array(case.numpy(y))))
    y, before = results[0]
    assert_same_bits(case.numpy(y), before, f"the result of {case.gemm} after another call")
