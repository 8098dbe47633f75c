"""Moved rows beside the front end's operations where the conformance suite does not look: strides, wide rows, fewer
places, NaN where nobody reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo_torch
from octavo_torch.moe.rows import operators as move_operators
from octavo_torch_triton.moves import operators as moves

# the interpreter of Triton 3.6 makes integers of arrays [1] where a loop ends at a value
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

GROUPS = 5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _route(rng: np.random.Generator, tokens: int, k: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sizes, order, position, routed) of choices, some of which are of no group."""
    index = torch.from_numpy(rng.choice([0, 2, 3, 4, -1, GROUPS], (tokens, k))).to(device)
    sizes, order, position, routed = move_operators.route(index, GROUPS)
    return sizes, order, position, routed


def _wide(rng: np.random.Generator, rows: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows that lie in a wider tensor."""
    values = rng.standard_normal((rows, columns + 24)).astype(np.float32)
    return torch.from_numpy(values).to(device).to(dtype)[:, 8 : columns + 8]


def _assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.parametrize("columns", [1, 129, 2064])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_the_composed_ones(dtype: torch.dtype, columns: int, rng: np.random.Generator, device: str) -> None:
    """Of views and of more columns than a program has; what nobody reads may be NaN, also as a weight (fault 18)."""
    tokens, k = 21, int(rng.integers(1, 8))
    sizes, order, position, routed = _route(rng, tokens, k, device)
    weights = torch.rand(tokens, k, device=device)
    strange = torch.where(routed, weights, torch.nan)
    x, rows = _wide(rng, tokens, columns, dtype, device), _wide(rng, tokens * k, columns, dtype, device)
    rows[int(sizes.sum()) :] = torch.nan
    for given, expected in ((None, None), (strange, torch.where(routed, weights, 0))):
        ours, theirs = moves.permute_rows(x, order, position, routed, given), (x, order, position, routed, expected)
        _assert_same_bits(ours, move_operators.permute_rows(*theirs))
        ours = moves.combine_rows(rows, position, routed, given)
        _assert_same_bits(ours, move_operators.combine_rows(rows, position, routed, expected))


def test_bits_without_a_weight_are_kept(rng: np.random.Generator, device: str) -> None:
    """A copy: infinities, signed zeros, and the payload of each NaN."""
    _, order, position, routed = _route(rng, 19, 3, device)
    bits = rng.integers(0, 1 << 16, (19, 40), dtype=np.uint16).view(np.int16)
    for dtype in DTYPES[:2]:
        x = torch.from_numpy(bits).to(device).view(dtype)
        ours = moves.permute_rows(x, order, position, routed, None)
        _assert_same_bits(ours, move_operators.permute_rows(x, order, position, routed, None))


def test_fewer_places_than_choices(rng: np.random.Generator, device: str) -> None:
    """Places of the routed and one more, as a layer over several ranks has: the sums' bits, no row out of bounds."""
    tokens, k = 33, 4
    sizes, order, position, routed = _route(rng, tokens, k, device)
    total = int(sizes.sum())
    places = total + 1
    cut = torch.where(routed, position, places - 1)
    x = torch.randn(tokens, 48, device=device)
    rows = moves.permute_rows(x, order[:places], cut, routed, None)
    assert rows.shape == (places, 48)
    _assert_same_bits(rows[:total], x[order[:total] // k])
    rows[total:] = torch.nan
    weights = torch.rand(tokens, k, device=device)
    full = move_operators.combine_rows(
        move_operators.permute_rows(x, order, position, routed, None), position, routed, weights
    )
    _assert_same_bits(moves.combine_rows(rows, cut, routed, weights), full)
    exact = (rows.double()[cut] * x.double()[:, None]).sum(-1)
    bound = 50 * 2.0**-24 * (rows.double()[cut] * x.double()[:, None]).abs().sum(-1)
    products = moves.dot_rows(rows, x, cut, routed).double()
    assert ((products - exact).abs() <= bound)[routed].all()
    assert not products[~routed].any()


@pytest.mark.parametrize("columns", [1, 40, 3000])
def test_products(columns: int, rng: np.random.Generator, device: str) -> None:
    """fp32 sums within n u of float64, an infinite dy of an unrouted choice without a trace; a token repeated by
    stride 0 (fault 11)."""
    tokens, k = 18, 3
    sizes, _, position, routed = _route(rng, tokens, k, device)
    routed[0], position[0] = False, 0
    rows = _wide(rng, tokens * k, columns, torch.bfloat16, device)
    rows[int(sizes.sum()) :] = torch.nan
    once = _wide(rng, 1, columns, torch.bfloat16, device)
    for dy in (_wide(rng, tokens, columns, torch.bfloat16, device), once.expand(tokens, columns)):
        terms = rows.double()[position] * dy.double()[:, None]
        products = moves.dot_rows(rows, dy, position, routed)
        _assert_same_bits(moves.dot_rows(rows, dy, position, routed), products)
        bound = (columns + 2) * 2.0**-24 * terms.abs().sum(-1)
        assert ((products.double() - terms.sum(-1)).abs() <= bound)[routed].all()
        assert not products[~routed].view(torch.int32).any()
    dy = _wide(rng, tokens, columns, torch.bfloat16, device)
    dy[0] = torch.inf
    assert not moves.dot_rows(rows, dy, position, routed)[0].view(torch.int32).any()


@pytest.mark.parametrize(("tokens", "k", "columns"), [(0, 2, 8), (3, 2, 0), (3, 0, 8), (1, 1, 1)])
def test_nothing_to_move(tokens: int, k: int, columns: int, device: str) -> None:
    """No token, no column and no choice are sizes like others; a sum of no rows is zero."""
    x = torch.ones(tokens, columns, device=device)
    position = torch.arange(tokens * k, device=device).view(tokens, k)
    routed = torch.ones(tokens, k, dtype=torch.bool, device=device)
    rows = moves.permute_rows(x, position.view(-1), position, routed, None)
    _assert_same_bits(rows, torch.ones(tokens * k, columns, device=device))
    _assert_same_bits(moves.combine_rows(rows, position, routed, None), x * k)
    products = moves.dot_rows(rows, x, position, routed)
    _assert_same_bits(products, torch.full((tokens, k), float(columns), device=device))


def test_permute_and_back_by_name(rng: np.random.Generator, device: str, backend: str) -> None:
    """octavo_torch.permute and unpermute with this backend, and every gradient: the bits of the composed ones, of
    weights' gradients the value. It does not sort: the front end does."""
    index = torch.from_numpy(rng.choice([0, 2, 3, 4, -1, GROUPS], (24, 3))).to(device)
    drawn = torch.randn(24, 40, device=device), torch.rand(24, 3, device=device), torch.randn(24, 40, device=device)

    def run(name: str) -> list[Any]:
        x, weights = (value.clone().requires_grad_() for value in drawn[:2])
        rows, sizes, routing = octavo_torch.permute(x, index, GROUPS, backend=name)
        y = octavo_torch.unpermute(rows * rows, routing, weights, backend=name)
        return [sizes, y, *torch.autograd.grad(y, (x, weights), drawn[2])]

    (*ours, weights_ours), (*theirs, weights_theirs) = run(backend), run("torch-reference")
    for mine, composed in zip(ours, theirs, strict=True):
        _assert_same_bits(mine.detach(), composed.detach())
    torch.testing.assert_close(weights_ours, weights_theirs)


def test_operators_pass_opcheck(rng: np.random.Generator, device: str) -> None:
    """Fake kernels against real metadata, so that a compiler may have them (fault 46)."""
    space, x = torch.ops.octavo_torch_triton, torch.randn(9, 40, device=device)
    _, order, position, routed = _route(rng, 9, 2, device)
    weights, rows = torch.rand(9, 2, device=device), torch.randn(18, 40, device=device)
    for operator, arguments in (
        (space.permute_rows, (x, order, position, routed, weights)),
        (space.combine_rows, (rows, position, routed, None)),
        (space.dot_rows, (rows, x, position, routed)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
