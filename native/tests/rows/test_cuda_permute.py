"""Routing and moved rows on a GPU against their CPU twins. Skipped where there is no device."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from devices import needs_device

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from move_calls import CASES, Routed, draw_index, draw_rows, route  # noqa: E402  it imports torch
from problems import CPU, CUDA, DTYPES  # noqa: E402

pytestmark = needs_device

U = 2.0**-24


@pytest.fixture
def draw(rng: np.random.Generator) -> torch.Generator:
    """torch's generator with the test's seed."""
    return torch.Generator().manual_seed(int(rng.integers(1 << 40)))


@pytest.mark.parametrize("groups", [1, 5, 64, 300, 1500])
def test_routes_are_those_of_the_cpu(groups: int, draw: torch.Generator) -> None:
    """Any number of choices around the 1 024 threads of a CTA and the 2 048 that one counts, in the choices' order, in
    one launch and in two (faults.md 18, 61)."""
    for count in (0, 1, 31, 33, 1023, 1025, 5000, 24_577, 40_960, 70_001, 600_000):
        index = draw_index(draw, count, 1, groups)
        theirs = route(CPU, index, groups)
        for workspace in (False, True):
            ours = route(CUDA, index, groups, workspace=workspace)
            for one, other in zip(ours.tensors, theirs.tensors, strict=True):
                assert torch.equal(one.cpu(), other), (count, workspace)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_move_as_on_the_cpu(case: tuple[int, int, int, int], dtype: str, draw: torch.Generator) -> None:
    """Bit for bit: whole 16-byte pieces and single values, with weights and without, rows apart; the gradient of
    weights within n u of float64, the same each time (faults.md 11)."""
    tokens, each, cols, groups = case
    index = draw_index(draw, tokens, each, groups)
    both: list[Routed] = [route(place, index, groups) for place in (CPU, CUDA)]
    weights = torch.rand(tokens, each, generator=draw)
    for gap, weight in itertools.product((0, 8, 3), (None, weights)):
        x = draw_rows(draw, tokens, cols, dtype, gap, CPU)
        rows = draw_rows(draw, tokens * each, cols, dtype, gap, CPU)
        rows[both[0].used :] = torch.nan
        for what, given in (("permute_rows", x), ("combine_rows", rows)):
            there = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cuda").copy_(given)
            theirs = both[0].move(what, given, weight)
            ours = both[1].move(what, there, None if weight is None else weight.cuda())
            assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8)), f"{what}, gap {gap}"
        made = both[1].dot(rows.cuda(), x.cuda())
        assert torch.equal(made, both[1].dot(rows.cuda(), x.cuda()))
        live = both[0].tensors[3].bool()
        terms = torch.where(live[..., None], rows[both[0].tensors[2]].double() * x[:, None].double(), 0.0)
        assert ((made.cpu() - terms.sum(-1)).abs() <= (cols + 2) * U * terms.abs().sum(-1)).all()
