"""Shards of an operand whose scales and random bits are those of the whole one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import octavo
from octavo_jax import MeshAxes
from octavo_jax.arithmetic.quantize import Random, Span
from octavo_jax.arithmetic.rows import RaggedRows
from octavo_jax.sharding.blocks import Blocks
from octavo_jax.sharding.placement import Placement
from octavo_jax.sharding.quantizers import spans

M, C = 40, 64
HALF = C // 2


def test_random_bits_are_counted_from_the_whole_operands_first_column(rng: np.random.Generator) -> None:
    """The right half of a row under tensor parallelism draws what it draws in the whole row, row and column data."""
    key = jnp.asarray(rng.integers(0, 1 << 32, 2, np.uint32))

    @partial(jax.jit, static_argnums=0)
    def drawn(columns: int, first: Array) -> tuple[Array, Array]:
        rows, random = RaggedRows(jnp.asarray([17, 20]), M), Random(key, 2, np.uint32(5), first)
        return random.row_data(rows, columns // 16), random.column_data(rows, columns)

    whole, right = drawn(C, jnp.uint32(0)), drawn(HALF, jnp.uint32(HALF))
    for a, b in zip(whole, right, strict=True):
        assert np.array_equal(a[..., HALF:], b)
        assert not np.array_equal(a[..., :HALF], b)


def test_blocks_are_numbered_over_the_whole_mesh(mesh_of: Any) -> None:
    """Two blocks of experts and two of data on each of eight shards: a group draws the bits that it draws on one
    device, where data blocks are counted outside and expert blocks inside."""
    mesh = mesh_of(ep=2, fsdp=4)
    experts, data, groups, offset = 2 * mesh.shape["ep"], 2 * mesh.shape["fsdp"], 3, 5
    placement = Placement(MeshAxes(ep="ep", fsdp="fsdp"), mesh.abstract_mesh, (experts, data))

    def numbers(sizes: Array) -> Array:
        blocks = Blocks.of(placement, sizes)
        first = [blocks.first_group(np.uint32(offset), block, groups) for block in blocks]
        return jnp.stack(first).reshape(sizes.shape[:2])

    spec: Any = jax.sharding.PartitionSpec("ep", "fsdp")
    here = jax.shard_map(numbers, mesh=mesh, in_specs=spec, out_specs=spec)
    made = jax.jit(here)(jnp.zeros((experts, data, groups), jnp.int32))
    e, f = np.indices((experts, data))
    assert np.array_equal(made, offset + (f * experts + e) * groups)


def test_which_recipes_have_scales_that_span_shards() -> None:
    """Blocks lie within shards, and delayed scaling's scales are given; the others reduce amaxes over the mesh."""

    def of(name: str, operand: Any = "w") -> bool:
        spec = octavo.recipe(name).quantizer(operand)
        assert spec is not None
        return spans(spec, Span(columns=("tp",)))

    assert not any(of(name) for name in ("fp8-delayed", "fp8-block", "mxfp8"))
    assert all(of(name) for name in ("fp8-current", "fp8-row", "nvfp4"))
