"""grouped_dense with `sharding` on Auto meshes: one device's result, and what moves between devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import layer_cases as cases
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layer_cases import GROUPS, ROWS, Case

import octavo
from octavo_jax import MeshAxes
from octavo_jax.traffic import Collective, collectives

EP_FSDP = MeshAxes(ep="ep", fsdp="fsdp")
COLUMN = MeshAxes(ep="ep", fsdp="fsdp", tp="tp")
ROW = MeshAxes(ep="ep", fsdp="fsdp", tp="tp", tp_dim="K")
CUBE = {"ep": 2, "fsdp": 2, "tp": 2}
RECIPES = (
    "bf16",
    "fp8-delayed",
    "fp8-current",
    "fp8-row-wgrad-high-precision",
    "fp8-row",
    "fp8-block",
    "mxfp4",
    "mxfp8",
    "nvfp4",
)

REPRESENTATIVES = (
    Case("mxfp8", {"ep": 2, "fsdp": 4}, (2, 4), EP_FSDP),
    Case("fp8-row", CUBE, (2, 2), ROW, "nk", k=128, n=128),
    # dp, ep and fsdp at once, with two data blocks on a shard
    Case("fp8-delayed", {"dp": 2, "fsdp": 2, "ep": 2}, (2, 8), MeshAxes(dp="dp", fsdp="fsdp", ep="ep"), k=64, n=64),
    # tokens that lie on ep alone: every member of fsdp has them all
    Case("bf16", {"ep": 4, "fsdp": 2}, (4,), EP_FSDP, k=64, n=64),
)
TABLE = (
    Case("fp8-current", CUBE, (2, 2), ROW, "nk"),
    Case("fp8-row", {"dp": 2, "fsdp": 2, "ep": 2}, (8,), MeshAxes(dp="dp", fsdp=("fsdp", "ep"), fsdp_dim="N")),
    *(
        case
        for recipe in RECIPES
        for case in (
            Case(recipe, {"ep": 1, "fsdp": 1}, (2, 2), EP_FSDP),
            Case(recipe, {"ep": 1, "fsdp": 8}, (1, 8), EP_FSDP, k=1024),
            Case(recipe, {"ep": 2, "fsdp": 4}, (2, 8), EP_FSDP, "nk", k=512),
            Case(recipe, {"ep": 4, "fsdp": 2}, (4, 2), EP_FSDP),
            Case(recipe, {"ep": 8, "fsdp": 1}, (8, 1), EP_FSDP),
            Case(recipe, {"ep": 8, "fsdp": 1}, (8,), EP_FSDP),
            Case(recipe, CUBE, (2, 2), COLUMN),
            Case(recipe, CUBE, (4, 4), ROW),
        )
    ),
)


@pytest.mark.parametrize(
    "case", [*REPRESENTATIVES, *(pytest.param(case, marks=pytest.mark.slow) for case in TABLE)], ids=str
)
def test_a_mesh_computes_what_one_device_does(case: Case, rng: np.random.Generator, mesh_of: Any, placed: Any) -> None:
    """y, dx, dw, dbias and recorded amaxes of every recipe; tails of each block are NaN and move nothing.

    The program gathers planes of the kernel and reduces its gradient once: nothing else moves, but partial sums over
    tp. No collective has rows of tokens, but those sums.
    """
    mesh, given = mesh_of(**case.mesh), cases.inputs(case, rng)
    arrays = placed(mesh, given.arrays[:-1], cases.shardings(case))
    scales = tuple(jax.device_put(s, NamedSharding(mesh, P())) for s in given.scales)
    program = jax.jit(partial(cases.run, case, case.axes, np.uint32(0)))
    compiled = program.lower(*arrays, scales).compile()
    *made, amaxes = compiled(*arrays, scales)
    cases.assert_same(case, given, [*made, *(amaxes or ())], cases.one_by_one(case, given))
    assert_traffic(case, mesh.shape, collectives(compiled))


def assert_traffic(case: Case, size: Mapping[str, int], moved: tuple[Collective, ...]) -> None:
    """What may move: planes of the kernel, its gradient once, sums over tp, and words for scales."""
    shards = {role: int(np.prod([size[name] for name in case.axes.names(role)])) for role in ("dp", "fsdp", "tp", "ep")}  # type: ignore[arg-type]
    kernel = int(np.prod(case.shape)) // shards["ep"] // shards["tp"]
    quantized = octavo.recipe(case.recipe).quantizer("w") is not None
    kinds: Counter[str] = Counter()
    for one in moved:
        for result in one.results:
            length = int(np.prod(result.shape))
            tokens = ROWS in result.shape
            assert not tokens or (one.kind == "all-reduce" and shards["tp"] > 1), one
            if one.kind == "all-gather":
                assert result.dtype == "u8" or length < kernel or not quantized, one
            if not tokens and length * (shards["fsdp"] if one.kind == "reduce-scatter" else 1) == kernel:
                kinds[one.kind] += 1
    data = len(case.blocks) == 2 or not case.axes.ep
    assert kinds["reduce-scatter"] == (shards["fsdp"] > 1 and data), kinds
    assert kinds["all-reduce"] == 0, kinds
    gathers = {True: (1, 2), False: (0,)}[shards["fsdp"] > 1]
    assert kinds["all-gather"] in gathers or case.recipe == "nvfp4", kinds
    assert GROUPS * ROWS not in (case.k, case.n)
