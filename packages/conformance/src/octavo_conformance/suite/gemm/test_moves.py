"""Choices sorted by group, and rows of tokens that move with them, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest

from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits, assert_same_tensor, assert_zeros
from octavo_conformance.oracles.functions import U
from octavo_conformance.oracles.keeping import keeping
from octavo_conformance.oracles.quantizing import arguments_for, as_given
from octavo_conformance.problems.case import Case, Measure
from octavo_conformance.problems.inputs import DTYPES, Array, Rng, draw
from octavo_numerics import quantize
from octavo_registry.contract import BoundQuantize
from octavo_registry.contract.cards import Move

TOKENS, CHOICES, GROUPS = 37, 3, 5


@dataclass(frozen=True, eq=False)
class Routing:
    """What `route` makes of choices [T, k], by its contract."""

    sizes: Array
    order: Array
    position: Array
    routed: Array


def draw_choices(rng: Rng) -> Array:
    """int64 [T, k]: some of no group, a group without any."""
    return rng.choice(np.array([0, 2, 3, 4, -1, GROUPS, 1 << 40]), (TOKENS, CHOICES))


def by_contract(index: Array) -> Routing:
    """Groups in order, choices in order within them, those of no group last."""
    routed = (index >= 0) & (index < GROUPS)
    keys = np.where(routed, index, GROUPS).reshape(-1)
    order = np.argsort(keys, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(order.size)
    return Routing(np.bincount(keys, minlength=GROUPS + 1)[:GROUPS], order, position.reshape(index.shape), routed)


def on_device(case: Case, routing: Routing) -> tuple[Any, Any, Any]:
    """order, position and routed as the framework has them."""
    return case.array(routing.order), case.array(routing.position), case.array(routing.routed)


def draw_weights(rng: Rng) -> Array | None:
    """fp32 [T, k], or none."""
    return None if rng.random() < 0.3 else rng.random((TOKENS, CHOICES), dtype=np.float32)


def columns(rng: Rng) -> int:
    """Whole pieces of 16 bytes, and other widths."""
    return int(rng.choice([1, 40, 129]))


def _function(case: Case, op: Move, **fields: Any) -> Callable[..., Any]:
    """The backend's, which may write none of its arguments."""
    return keeping(case, op, case.plan(op, **fields).run)


@needs("route", selections.unquantized)
def test_route(case: Case, rng: Rng) -> None:
    """Stable, nobody's choices last and in no size, each position the inverse of the order (faults 18, 61)."""
    index = case.array(draw_choices(rng))
    expected = by_contract(case.integers(index))
    *places, routed = _function(case, "route", groups=GROUPS)(index, GROUPS)
    for name, array in zip(("sizes", "order", "position"), places, strict=True):
        assert_same_bits(case.integers(array), getattr(expected, name), name)
    assert_same_bits(case.numpy(routed), expected.routed, "routed")


@needs("permute_rows", selections.unquantized)
def test_permute_rows(case: Case, rng: Rng) -> None:
    """A token's row once per choice, times its weight and rounded once; zeros past the sum."""
    index, weights, x = draw_choices(rng), draw_weights(rng), draw(rng, (TOKENS, columns(rng)), case.dtype)
    routing = by_contract(index)
    factors = None if weights is None else case.array(weights)
    rows = _function(case, "permute_rows")(case.array(x), *on_device(case, routing), factors)
    factor = np.float32(1) if weights is None else weights[..., None]
    weighted = x.astype(np.float32)[:, None] * factor * np.ones((1, CHOICES, 1), np.float32)
    expected = np.zeros((TOKENS * CHOICES, x.shape[1]), DTYPES[case.dtype])
    expected[routing.position[routing.routed]] = weighted[routing.routed].astype(DTYPES[case.dtype])
    assert_same_bits(case.numpy(rows), expected, "rows")


@needs("combine_rows", selections.unquantized)
def test_combine_rows(case: Case, rng: Rng) -> None:
    """fp32 sums in the order of choices, rounded once; NaN past the sum, and as the weight of nobody's choice, stays
    there (faults 14, 18)."""
    index, weights = draw_choices(rng), draw_weights(rng)
    routing, rows = by_contract(index), draw(rng, (TOKENS * CHOICES, columns(rng)), case.dtype)
    rows[int(routing.sizes.sum()) :] = np.nan
    if weights is not None:
        weights[~routing.routed] = np.nan
    factors = None if weights is None else case.array(weights)
    y = _function(case, "combine_rows")(case.array(rows), *on_device(case, routing)[1:], factors)
    total = np.zeros((TOKENS, rows.shape[1]), np.float32)
    for j in range(CHOICES):
        part = rows[routing.position[:, j]].astype(np.float32)
        part = part if weights is None else part * weights[:, j, None]
        total += np.where(routing.routed[:, j, None], part, np.float32(0))
    assert_same_bits(case.numpy(y), total.astype(DTYPES[case.dtype]), "y")


@needs("combine_rows", selections.unquantized)
def test_combine_rows_of_other_places(case: Case, rng: Rng) -> None:
    """A layer over several ranks sums rows of buffers with more places than it has choices, wherever they stand; NaN
    at the other places stays there."""
    choices = TOKENS * CHOICES
    places = rng.permutation(3 * choices)[:choices]
    places[places == 3 * choices - 1] = places[0]
    places[0] = 3 * choices - 1  # the last place of all
    position, routed = places.reshape(TOKENS, CHOICES), rng.random((TOKENS, CHOICES)) < 0.8
    rows = np.full((3 * choices, columns(rng)), np.nan, DTYPES[case.dtype])
    rows[position[routed]] = draw(rng, (int(routed.sum()), rows.shape[1]), case.dtype)
    y = case.plan("combine_rows").run(case.array(rows), case.array(position), case.array(routed), None)
    total = np.zeros((TOKENS, rows.shape[1]), np.float32)
    for j in range(CHOICES):
        total += np.where(routed[:, j, None], rows[position[:, j]].astype(np.float32), np.float32(0))
    assert_same_bits(case.numpy(y), total.astype(DTYPES[case.dtype]), "y")


@needs("dot_rows", selections.unquantized)
def test_dot_rows(case: Case, rng: Rng, measure: Measure) -> None:
    """The gradient of weights within n u of float64, zero where a choice is nobody's, the same each time (fault 11)."""
    index, width = draw_choices(rng), columns(rng)
    routing, rows = by_contract(index), draw(rng, (TOKENS * CHOICES, width), case.dtype)
    dy = draw(rng, (TOKENS, width), case.dtype)
    rows[int(routing.sizes.sum()) :] = np.nan
    run, places = _function(case, "dot_rows"), on_device(case, routing)[1:]
    products, again = (case.numpy(run(case.array(rows), case.array(dy), *places)) for _ in range(2))
    assert_same_bits(again, products, "products of a second run")
    assert products.dtype == np.float32, f"products are {products.dtype}; they are float32"
    terms = rows[routing.position].astype(np.float64) * dy.astype(np.float64)[:, None]
    exact, allowed = terms.sum(-1), (width + 2) * U * np.abs(terms).sum(-1)
    error = np.abs(products - exact)[routing.routed] / np.maximum(allowed[routing.routed], np.finfo(np.float64).tiny)
    assert (error <= 1).all(), f"products are off by {error.max()} times their bound"
    assert_zeros(products[~routing.routed], "the product of a choice that is nobody's")
    measure("bound.products", float(error.max(initial=0)))


@needs("quantize", selections.ragged)
def test_codes_of_tokens(case: Case, rng: Rng) -> None:
    """`of_tokens`, where the answer has it, makes the codes and the amax of permuted rows: choices that are nobody's,
    one group's alone, and no other (fault 18)."""
    columns = 272
    bound = case.plan("quantize", quantizer=case.spec, k=columns, groups=GROUPS).bound
    of_tokens = bound.of_tokens if isinstance(bound, BoundQuantize) else None
    if of_tokens is None:
        pytest.skip("the answer has no of_tokens: front ends permute rows first")
    make = keeping(case, "of_tokens", of_tokens)
    for index in (draw_choices(rng), np.full((TOKENS, CHOICES), GROUPS - 1), np.full((TOKENS, CHOICES), -1)):
        routing, x = by_contract(index), draw(rng, (TOKENS, columns), case.dtype)
        rows = x[routing.order // CHOICES]
        arguments = arguments_for(case.spec, rng, GROUPS)
        expected = quantize(rows, case.spec, routing.sizes, **arguments)
        places, given = on_device(case, routing), as_given(case, arguments)
        codes, amax = make(case.array(x), case.sizes(routing.sizes), *places, amax=True, **given)
        assert_same_tensor(case, codes, expected)
        parts = np.split(np.abs(rows.astype(np.float32)), np.cumsum(routing.sizes))
        largest = np.array([part.max(initial=0) for part in parts[:GROUPS]], np.float32)
        assert_same_bits(case.numpy(amax), largest, "amax")


@needs("combine_rows", selections.unquantized, graph_safe=True)
def test_moves_read_no_value(case: Case, rng: Rng) -> None:
    """Graph-safe moves wait for no value of the routing (fault 36); a backend need not serve all four of them."""
    x, choices = case.array(draw(rng, (TOKENS, 40), case.dtype)), draw_choices(rng)
    served = [op for op in get_args(Move) if case.refusal_of(case.request(op, groups=GROUPS)) is None]
    plans = {op: case.plan(op, groups=GROUPS).run for op in served}
    rows = case.array(draw(rng, (TOKENS * CHOICES, 40), case.dtype))

    def call(x: Any, rows: Any, index: Any, *routing: Any) -> Any:
        places = plans["route"](index, GROUPS)[1:] if "route" in plans else routing
        if "permute_rows" in plans:
            rows = plans["permute_rows"](x, *places, None)
        products = plans["dot_rows"](rows, x, *places[1:]) if "dot_rows" in plans else None
        return plans["combine_rows"](rows, *places[1:], products)

    reads = case.bridge.host_reads(call, x, rows, case.array(choices), *on_device(case, by_contract(choices)))
    assert not reads, f"moves wait for values: {', '.join(reads)}"
