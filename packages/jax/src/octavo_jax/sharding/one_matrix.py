"""Layers of one matrix across a mesh: the tokens are cut into data blocks, one for each shard of dp and fsdp.

Scales are of a shard's own tokens, and nothing about them crosses the mesh in the forward pass.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from octavo_jax.arrays.axes import DenseAxes
from octavo_jax.arrays.sizes import one_group
from octavo_jax.sharding import specs
from octavo_jax.sharding.axes import MeshAxes, roles_in_force
from octavo_jax.sharding.conflicts import check_has_roles, check_whole
from octavo_jax.sharding.explicit_placement import explicit_axes, placed
from octavo_jax.sharding.placement import Letter, Placement
from octavo_jax.sharding.placement_of_call import placement_of


def matrix_placement(
    function: str, sharding: MeshAxes | None, x: Array, kernel: Array, /, **operands: Any
) -> Placement | None:
    """The placement of x [..., K] and a kernel of one matrix; None on one device.

    operands   the kernel and all else beside x that a mesh may cut, by the names of `function`'s arguments

    Of a model's roles (`mesh_roles`) ep spreads tokens, and fsdp_dim="G" is as if it were not given. ValueError where a
    role is for groups, no mesh is in scope, or the shards do not divide the first axis of x.
    """
    is_of_model = sharding is None
    sharding = roles_in_force(sharding)
    check_has_roles(function, sharding, x=x, **operands)
    if sharding is None:
        return None
    if is_of_model and sharding.fsdp_dim == "G":
        sharding = replace(sharding, fsdp_dim=None)
    placement = placement_of(sharding, (1,), x, kernel)
    if placement is None:
        return None
    if is_of_model:
        placement = replace(placement, one_matrix=True)
    elif sharding.ep is not None or sharding.fsdp_dim == "G":
        role = f"ep={sharding.ep!r}" if sharding.ep is not None else "fsdp_dim='G'"
        raise ValueError(f"{function} was given {role} and its kernel is one matrix, without groups; leave it out")
    if placement.mesh is None:
        raise ValueError(
            f"{function} was given {sharding!r} and no mesh is in scope, so the number of shards is "
            "unknown; call it under jax.set_mesh(mesh)"
        )
    axes = placement.non_manual(placement.axes_of("f"))
    shards = placement.shard_count(axes)
    if not axes or (shards == 1 and x.ndim < 2):
        return placement
    if x.ndim < 2 or x.shape[0] % shards:
        raise ValueError(
            f"x has shape {list(x.shape)} and dp={sharding.dp!r}, fsdp={sharding.fsdp!r} cut its first axis into "
            f"{shards}; give a multiple of that"
        )
    return replace(placement, blocks=(shards,))


def gathered_shards(placement: Placement | None) -> tuple[int, int]:
    """How many shards of K and of N the caller's shard_map has made along fsdp."""
    return (1, 1) if placement is None else (placement.whole_size("k", 1), placement.whole_size("n", 1))


def reshaped(placement: Placement, array: Array, shape: tuple[int, ...], spec: PartitionSpec) -> Array:
    """`array` with another shape, placed as `spec` on the Explicit axes of a mesh."""
    if placement.mesh is None or not explicit_axes(placement.mesh):
        return array.reshape(shape)
    return lax.reshape(array, shape, out_sharding=NamedSharding(placement.mesh, spec))


def _spec(placement: Placement, *letters: Letter | None) -> Any:
    return specs.spec_of(placement, letters)


def in_blocks(placement: Placement | None, x: Array, axes: DenseAxes) -> Array:
    """x [*L, *K] as rows [M, K], or [F, M / F, K] where the mesh cuts L."""
    if placement is None:
        return x.reshape(-1, axes.k)
    x = placed(placement.mesh, "x", x, _rows_spec(placement, axes, "i", axes.contracted), tokens=True)
    rows = math.prod(axes.rows) // math.prod(placement.blocks)
    return reshaped(placement, x, (*placement.blocks, rows, axes.k), specs.rows(placement, "i"))


def out_of_blocks(placement: Placement | None, y: Array, axes: DenseAxes, letter: Letter = "o") -> Array:
    """Rows with y's features ("o") as [*L, *N], or with x's ("i") as [*L, K]."""
    columns = axes.columns if letter == "o" else (axes.k,)
    shape = (*axes.rows, *columns)
    if placement is None:
        return y.reshape(shape)
    return reshaped(placement, y, shape, _rows_spec(placement, axes, letter, len(columns)))


def _rows_spec(placement: Placement, axes: DenseAxes, column: Letter, columns: int) -> Any:
    lead: list[Letter | None] = ["f", *[None] * (len(axes.rows) - 1)] if axes.rows else []
    return _spec(placement, *lead, *([column, *[None] * (columns - 1)] if columns else []))


def as_stack(placement: Placement | None, kernel: Array, axes: DenseAxes) -> Array:
    """The kernel as a stack of one matrix, [1, K, N] or [1, N, K]."""
    matrix = axes.matrix(kernel.shape)
    if placement is None:
        return kernel.reshape(matrix)
    k: list[Letter | None] = ["k", *[None] * (axes.contracted - 1)]
    n: list[Letter | None] = ["n", *[None] * (len(axes.columns) - 1)] if axes.columns else []
    kernel = placed(placement.mesh, "kernel", kernel, _spec(placement, *(k + n if axes.weight == "kn" else n + k)))
    return reshaped(placement, kernel, matrix, specs.kernel(placement, axes.weight))


def as_row(placement: Placement | None, bias: Array | None) -> Array | None:
    """A bias [*N] as [1, N]."""
    if bias is None or placement is None:
        return None if bias is None else bias.reshape(1, -1)
    letters: list[Letter | None] = ["o", *[None] * (bias.ndim - 1)] if bias.ndim else []
    bias = placed(placement.mesh, "bias", bias, _spec(placement, *letters))
    return reshaped(placement, bias, (1, bias.size), specs.groups(placement, columns="o"))


def replicated_norm_parameters(
    function: str, placement: Placement | None, gamma: Array, beta: Array | None
) -> tuple[Array, Array | None]:
    """gamma and beta [K] of a normalization before the layer; ValueError where an Explicit mesh cuts them, for every
    device reads all of both."""
    if placement is None:
        check_whole(function, gamma=gamma, beta=beta)
        return gamma, beta
    mesh, whole = placement.mesh, PartitionSpec(None)  # type: ignore[no-untyped-call]
    return placed(mesh, "gamma", gamma, whole), None if beta is None else placed(mesh, "beta", beta, whole)


def sizes_of_one_group(placement: Placement | None, rows: Array) -> Array:
    """The sizes of rows that are one group: [1], or [F, 1] of blocks."""
    sizes = one_group(rows.shape[-2])
    if placement is None or not placement.blocks:
        return sizes
    return placed(placement.mesh, "sizes", jnp.tile(sizes, (*placement.blocks, 1)), specs.sizes(placement))
