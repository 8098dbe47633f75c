"""A whole grouped linear layer of the backend, and its comparison with the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS
from octavo_conformance.oracles.checks import (
    CUTS,
    assert_bias_gradient,
    assert_same_bits,
    assert_within_bound,
    assert_zero_groups,
    assert_zero_rows,
    blocks_of,
    with_bias,
)
from octavo_conformance.problems.case import OPERANDS, Case, Measure
from octavo_conformance.problems.inputs import Array
from octavo_conformance.problems.operands import SEED, Problem, by_definition


@dataclass(frozen=True, eq=False)
class Outcome:
    """The results in numpy; None where one was not requested."""

    y: Array
    dx: Array | None
    dw: Array | None
    db: Array | None

    def arrays(self) -> dict[str, Array]:
        """Those that are present, by name."""
        return {name: array for name in ("y", "dx", "dw", "db") if (array := getattr(self, name)) is not None}

    def assert_bits_of(self, other: Outcome, what: str) -> None:
        """Every result has the same bits as `other`'s."""
        for name, array in other.arrays().items():
            assert_same_bits(self.arrays()[name], array, f"{name}, {what}")


def run_layer(
    case: Case,
    problem: Problem,
    *,
    sizes: Any = None,
    bias: bool = True,
    backward: bool = True,
    seed: int = SEED,
    group_offset: int = 0,
    compiled: bool = False,
) -> Outcome:
    """The front end's public layer with this backend alone, forward and, with `backward`, its gradients."""
    recipe = case.recipe
    M, K = problem.x.shape
    with case.admitted(k=K, n=problem.w.shape[1], groups=len(problem.sizes)):
        result = case.bridge.grouped_linear(
            case.array(problem.x),
            case.array(problem.w),
            case.sizes(problem.sizes) if sizes is None else sizes,
            case.array(problem.dy) if backward else None,
            recipe=recipe,
            bias=case.array(problem.bias) if bias else None,
            seed=seed if recipe.stochastic else None,
            scales={name: case.array(scale) for name, scale in problem.scales.items()} if recipe.stateful else None,
            group_offset=group_offset,
            backend=case.backend,
            compiled=compiled,
        )
    results = {name: getattr(result, name) for name in ("y", "dx", "dw", "db")}
    arrays = {name: None if array is None else case.numpy(array) for name, array in results.items()}
    outcome = Outcome(**arrays)  # type: ignore[arg-type]
    assert outcome.y.shape == (M, problem.w.shape[1]), f"y has shape {outcome.y.shape}"
    if backward:
        for name, like in (("dx", problem.x), ("dw", problem.w)):
            array = getattr(outcome, name)
            assert array is not None, f"{name} is missing: no gradient came back (fault 38)"
            assert array.shape == like.shape, f"{name} has shape {array.shape}, its operand {like.shape}"
        assert not bias or (outcome.db is not None and outcome.db.shape == problem.bias.shape), "db is missing"
    return outcome


def assert_layer(
    case: Case,
    problem: Problem,
    outcome: Outcome,
    measure: Measure,
    *,
    seed: int = SEED,
    group_offset: int = 0,
    bias: bool = True,
    cuts: Sequence[str] = CUTS,
) -> None:
    """y, dx, dw, db are what the definition's codes and float64 sums give, tails and empty groups are exact zeros."""
    quantized: dict[Operand, Any] = {
        operand: by_definition(problem, case.recipe, operand, seed=seed, group_offset=group_offset)
        for operand in OPERANDS
    }
    results = {"fprop": outcome.y, "dgrad": outcome.dx, "wgrad": outcome.dw}
    for gemm in GEMMS:
        actual = results[gemm]
        if actual is None:
            continue
        used: dict[Operand, Any] = quantized if case.recipe.quantizes(gemm) else dict.fromkeys(OPERANDS)
        parts = blocks_of(problem, case.recipe, gemm, used, actual)
        if gemm == "fprop" and bias:
            parts = with_bias(parts, problem)
        assert_within_bound(case, case.recipe, gemm, parts, measure, cuts=cuts)
    assert_zero_rows(outcome.y, problem.total, "y")
    if outcome.dx is not None:
        assert_zero_rows(outcome.dx, problem.total, "dx")
    if outcome.dw is not None:
        assert_zero_groups(outcome.dw, problem.sizes)
    if outcome.db is not None:
        assert_bias_gradient(problem, outcome.db, measure)
