"""GEMMs that read the rows of a router's choices where the tokens stand: `TokenRows` in the place of an operand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.quantizer import Operand
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits, assert_zero_rows
from octavo_conformance.oracles.keeping import Surrounded
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import DTYPES, Array, Rng, draw
from octavo_conformance.problems.operands import RUN_ORDER, Problem, by_definition, gemm_operand, to_framework
from octavo_conformance.suite.gemm.test_moves import CHOICES, GROUPS, TOKENS, by_contract, draw_choices, on_device
from octavo_numerics import quantize
from octavo_registry.contract.moves import TokenRows

N, K = 144, 272  # tiles end in the middle of both


def _operands(case: Case, rng: Rng) -> dict[Operand, Array]:
    """Tokens' x and dy, and a weight."""
    return {
        "x": draw(rng, (TOKENS, K), case.dtype),
        "dy": draw(rng, (TOKENS, N), case.dtype),
        "w": draw(rng, (GROUPS, N, K), case.dtype),
    }


@needs("gemm", selections.unquantized_gemms)
def test_rows_of_tokens(case: Case, rng: Rng) -> None:
    """Where the answer takes tokens in high precision, a product of them has the bits of one of their rows: with
    choices that are nobody's, of one group alone, and of no group. A token that nobody chose may be NaN, and numbers in
    `order` past the sum may be no choice at all (fault 18)."""
    plan = case.plan(case.gemm, k=K, n=N, groups=GROUPS)
    bound: Any = plan.bound
    if not bound.takes_tokens:
        pytest.skip("the answer takes no tokens: front ends permute rows first")
    runs = [bound.run] if bound.limited is None else [bound.run, bound.limited(int(rng.integers(1, 64)))]
    for index in (draw_choices(rng), np.full((TOKENS, CHOICES), GROUPS - 1), np.full((TOKENS, CHOICES), -1)):
        index[rng.integers(TOKENS)] = -1
        routing, tokens = by_contract(index), _operands(case, rng)
        total = int(routing.sizes.sum())
        for operand in ("x", "dy"):
            tokens[operand][(index < 0).all(1)] = np.nan
        rows = {name: value if name == "w" else value[routing.order // CHOICES] for name, value in tokens.items()}
        routing.order[total:] = rng.choice(np.array([-1, TOKENS * CHOICES, 1 << 40]), routing.order.size - total)
        places, sizes = on_device(case, routing), case.sizes(routing.sizes)
        as_rows = [case.array(rows[name]) for name in RUN_ORDER[case.gemm]]
        expected = case.numpy(bound.run(*as_rows, sizes))
        for gathered in bound.takes_tokens:
            given = list(as_rows)
            given[RUN_ORDER[case.gemm].index(gathered)] = TokenRows(case.array(tokens[gathered]), *places)
            for run in runs:
                assert_same_bits(case.numpy(run(*given, sizes)), expected, f"{case.gemm} of {gathered}'s tokens")
        if case.gemm != "wgrad":
            assert_zero_rows(expected, total, case.gemm)


@needs("gemm", selections.weight_gemms)
def test_rows_of_codes_of_tokens(case: Case, rng: Rng) -> None:
    """Where the answer takes tokens in a recipe that quantizes them, a product of tokens, each quantized once, has the
    bits of one of quantized rows. The codes of a token that nobody chose may be NaN, and numbers in `order` past the
    sum may be no choice at all (fault 18)."""
    plan = case.plan(case.gemm, k=K, n=N, groups=GROUPS)
    bound: Any = plan.bound
    if not bound.takes_tokens:
        pytest.skip("the answer takes no codes of tokens: front ends quantize rows first")
    (gathered,) = bound.takes_tokens
    spec = case.recipe.quantizer(gathered)
    assert spec is not None, f"{gathered} is not quantized"
    assert spec.independent_rows, f"{gathered}'s codes are not those of its tokens"
    runs = [bound.run] if bound.limited is None else [bound.run, bound.limited(int(rng.integers(1, 64)))]
    index = draw_choices(rng)
    index[rng.integers(TOKENS)] = -1
    routing, tokens = by_contract(index), _operands(case, rng)
    total = int(routing.sizes.sum())
    tokens[gathered][(index < 0).all(1)] = np.nan
    rows = {name: value if name == "w" else value[routing.order // CHOICES] for name, value in tokens.items()}
    problem = Problem(**rows, sizes=routing.sizes, bias=np.zeros((GROUPS, N), np.float32), scales={})
    as_rows = [
        gemm_operand(case, plan, problem, name, by_definition(problem, case.recipe, name))
        for name in RUN_ORDER[case.gemm]
    ]
    routing.order[total:] = rng.choice(np.array([-1, TOKENS * CHOICES, 1 << 40]), routing.order.size - total)
    places, sizes = on_device(case, routing), case.sizes(routing.sizes)
    expected = case.numpy(bound.run(*as_rows, sizes))
    once = spec.with_orientation("rowwise")
    codes = to_framework(case, quantize(tokens[gathered][None], once), None)
    given = [TokenRows(codes, *places), as_rows[1]]
    for run in runs:
        assert_same_bits(case.numpy(run(*given, sizes)), expected, f"{case.gemm} of codes of {gathered}'s tokens")


@needs("gemm", selections.unquantized_wgrads)
def test_rows_of_tokens_are_added(case: Case, rng: Rng) -> None:
    """wgrad adds to `out`, in fp32 and in the dtype of the operands, what it adds of rows."""
    bound: Any = case.plan(case.gemm, k=K, n=N, groups=GROUPS).bound
    if not bound.takes_tokens:
        pytest.skip("the answer takes no tokens: front ends permute rows first")
    routing, tokens = by_contract(draw_choices(rng)), _operands(case, rng)
    places, sizes = on_device(case, routing), case.sizes(routing.sizes)
    x, dy = (tokens[name][routing.order // CHOICES] for name in ("x", "dy"))
    for dtype in (np.dtype(np.float32), DTYPES[case.dtype]):
        before = rng.standard_normal((GROUPS, N, K)).astype(dtype)
        memory = Surrounded(case)
        given = [case.array(x), case.array(dy)]
        expected = case.numpy(bound.run(*given, sizes, out=memory.array(before), accumulate=True))
        for gathered in bound.takes_tokens:
            given = [case.array(x), case.array(dy)]
            given[RUN_ORDER["wgrad"].index(gathered)] = TokenRows(case.array(tokens[gathered]), *places)
            actual = case.numpy(bound.run(*given, sizes, out=memory.array(before), accumulate=True))
            assert_same_bits(actual, expected, f"sums of {gathered}'s tokens in {dtype}")
        memory.assert_unwritten("wgrad")
