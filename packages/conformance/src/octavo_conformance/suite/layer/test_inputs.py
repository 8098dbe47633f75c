"""What a call is given belongs to the caller: values, codes, scales and group sizes keep their bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.grouped_tensor import PLAIN
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.oracles.quantizing import COLUMNS, GROUPS, ROWS, arguments_for, as_given, sizes_for
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import Array, Rng, draw
from octavo_conformance.problems.operands import MAIN, RUN_ORDER, by_definition, draw_problem, gemm_operand
from octavo_registry.contract.frameworks import PLANES


def _kept(case: Case, given: dict[str, Any]) -> dict[str, Array]:
    """Copies of the framework's arrays, those of a GroupedTensor by plane."""
    copies = {}
    for name, value in given.items():
        planes = {f"{name}.{plane}": getattr(value, plane) for plane in PLANES} if hasattr(value, PLANES[0]) else {}
        for label, array in (planes or {name: value}).items():
            if array is not None:
                copies[label] = np.array(case.numpy(array))
    return copies


def _assert_kept(case: Case, given: dict[str, Any], before: dict[str, Array], op: str) -> None:
    for name, array in _kept(case, given).items():
        assert_same_bits(array, before[name], f"{name}, which {op} was given and may not write,")


def _quantize(case: Case, rng: Rng, x: Array, sizes: Array | None, groups: int) -> None:
    arguments = as_given(case, arguments_for(case.spec, rng, groups))
    given = {
        "x": case.array(x),
        "group_sizes": None if sizes is None else case.sizes(sizes),
        "scale": arguments.get("scale"),
    }
    before = _kept(case, given)
    with case.admitted(k=x.shape[-1]):
        case.bridge.quantize(given["x"], case.spec, given["group_sizes"], backend=case.backend, **arguments)
    _assert_kept(case, given, before, "quantize")


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
    """Codes, scales, unquantized operands, group sizes and a bias are as they were: a layer's forward and backward
    share w, x and the sizes. Operands in a layout of the backend's own are its own business."""
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
    rest = {"bias": case.array(problem.bias)} if case.gemm == "fprop" else {}
    given |= rest
    before = _kept(case, given)
    plan.run(*operands.values(), sizes, **rest)
    _assert_kept(case, given, before, case.gemm)
