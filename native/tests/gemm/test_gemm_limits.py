"""A limit of CTAs changes no bit of a GEMM, on any tile and of any kind; the CPU, which has none, takes any limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from device_gemms import Prepared  # noqa: E402  torch is there
from devices import PLACES  # noqa: E402
from gemm_problems import GEMMS, Case, GemmName, make_problem  # noqa: E402
from problems import Place  # noqa: E402

RAGGED = (0, 1, 17, 130, 0, 96, 300)


def kinds(gemm: GemmName) -> list[Case]:
    """Every way in which a result leaves the kernels, and added weight gradients in addition."""
    square = gemm != "wgrad"
    cases = [
        Case(gemm=gemm),
        Case(gemm=gemm, scaling="current", out_dtype="float32"),
        Case(gemm=gemm, scaling="row"),
        Case(gemm=gemm, scaling="block", power_of_two=True),
        Case(gemm=gemm, scaling="block", right_square=square),
        Case(gemm=gemm, scaling="mxfp8"),
    ]
    if gemm == "wgrad":
        added = [replace(case, accumulate=True, out_dtype="float32") for case in cases]
        return cases + added + [replace(cases[0], accumulate=True)]
    return cases


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", [case for gemm in GEMMS for case in kinds(gemm)], ids=str)
def test_every_limit_has_the_same_bits(place: str, case: Case, rng: np.random.Generator) -> None:
    """A tile's CTA is a matter of the grid alone: one CTA, an odd few, as many as there are, and more than that."""
    where = Place(cuda=place == "cuda")
    prepared = Prepared(make_problem(rng, case, RAGGED, 144, 528, tail=21), where)
    tiles = range(-1, len(prepared.gemm.tiles())) if where.cuda else (-1,)
    for tile in tiles:
        free = prepared.result(tile)
        for ctas in (1, 2, int(rng.integers(3, 16)), 116, 131, 132, 100_000):
            limited = prepared.result(tile, ctas)
            assert np.array_equal(limited.view(np.uint8), free.view(np.uint8)), (tile, ctas)
