"""Auto meshes that are known when XLA partitions the program, and no sooner: custom_partitioning and its rules."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import layer_cases as cases
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layer_cases import ROWS, Case

from octavo_jax import MeshAxes
from octavo_jax.sharding.placement import Placement
from octavo_jax.sharding.shardy_rules import shardy_rule
from octavo_jax.traffic import collectives

AXES = MeshAxes(ep="ep", fsdp="fsdp", tp="tp")
CASE = Case("mxfp8", {"ep": 2, "fsdp": 2, "tp": 2}, (2, 2), AXES)
EXPERTS = Case("mxfp8", {"ep": 2, "fsdp": 2}, (2, 2), MeshAxes(ep="ep", fsdp="fsdp"))


@pytest.mark.parametrize("shardy", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["shardy", "gspmd"])
def test_a_program_lowered_from_shapes(shardy: bool, rng: np.random.Generator, mesh_of: Any) -> None:
    """`jax.jit(in_shardings=...)` of shapes tells of no mesh while it is traced: the result and what moves are the
    same. GSPMD's callbacks serve where JAX still has them."""
    if not shardy and not hasattr(jax.config, "jax_use_shardy_partitioner"):
        pytest.skip("this JAX has Shardy alone")
    case = CASE if shardy else EXPERTS
    mesh, given = mesh_of(**case.mesh), cases.inputs(case, rng)
    lie = [NamedSharding(mesh, spec) for spec in cases.shardings(case)]
    whole = NamedSharding(mesh, P())
    ins, outs = (*lie, whole), (lie[4], lie[0], lie[1], lie[2], None)
    before = getattr(jax.config, "jax_use_shardy_partitioner", None)
    try:
        if not shardy:
            jax.config.update("jax_use_shardy_partitioner", False)
        program = jax.jit(partial(cases.run, case, case.axes, np.uint32(0)), in_shardings=ins, out_shardings=outs)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), given.arrays)
        compiled = program.lower(*shapes).compile()
    finally:
        if not shardy:
            jax.config.update("jax_use_shardy_partitioner", before)
    arrays = [jax.device_put(a, s) for a, s in zip(given.arrays[:-1], lie, strict=True)]
    *made, _ = compiled(*arrays, jax.device_put(given.scales, whole))
    cases.assert_same(case, given, made, cases.one_by_one(case, given))
    kinds = [one.kind for one in collectives(compiled) for result in one.results if ROWS in result.shape]
    assert set(kinds) <= {"all-reduce"}
    assert [one.kind for one in collectives(compiled)].count("reduce-scatter") == (mesh.shape["fsdp"] > 1)


def test_gspmd_and_tensor_parallelism_are_refused(rng: np.random.Generator) -> None:
    """GSPMD would gather tokens between two calls: the sentence names the mesh to enter."""
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        pytest.skip("this JAX has Shardy alone")
    arrays = cases.inputs(CASE, rng).arrays
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with pytest.raises(ValueError, match=r"tp='tp'.*GSPMD.*jax\.set_mesh"):
            jax.eval_shape(partial(cases.run, CASE, AXES, np.uint32(0)), *arrays)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def test_shardys_rule_of_a_gemm() -> None:
    """Blocks and sharded features are factors; what a scale covers, rows and groups must not be sharded."""
    placement = Placement(AXES, None, (4, 2))
    tokens, scales = [("e",), ("f",), ("m",), ("i",)], [("e",), ("f",), ("m",), ("i",)]
    kernel, y = [("e", "g"), ("k",), ("o",)], [("e",), ("f",), ("m",), ("o",)]
    shapes = [(4, 2, 40, 256), (4, 2, 40, 8), (12, 256, 128), (4, 2, 40, 128)]
    rule = shardy_rule(placement, [tokens, scales, kernel], [y], shapes)
    assert rule.text == "e f r0 r1, e f r2 r3, (e r4) k o -> e f r5 o"
    assert set(rule.need_replication) == {f"r{i}" for i in range(6)}
    assert rule.sizes == {"r4": 3}


def test_shardys_rule_of_blocks_of_scales() -> None:
    """A payload's columns are blocks times what one scale covers, and shards lie between blocks."""
    placement = Placement(MeshAxes(ep="ep", tp="tp"), None, (4,))
    dims = [[("e",), ("m",), ("o",)], [("e",), ("m",), ("o",)]]
    rule = shardy_rule(placement, [dims[0]], dims, [(4, 40, 256), (4, 40, 256), (4, 40, 8)])
    assert rule.text == "e r0 (o r1) -> e r2 (o r3), e r4 o"
    assert rule.sizes == {"r1": 32, "r3": 32}
