"""Experts over a mesh without an axis of expert blocks: rows [M, K] and sizes [G], both cut by ep.

A device has M / E rows, those of its own G / E experts, with a tail of its own at their end. So the rows are E blocks
one after the other, and the rest of the layer takes them as [E, M / E, K].
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from octavo_jax.arrays.sizes import GroupSizes
from octavo_jax.sharding import specs
from octavo_jax.sharding.axes import MeshAxes
from octavo_jax.sharding.explicit_placement import placed
from octavo_jax.sharding.one_matrix import reshaped
from octavo_jax.sharding.placement import Letter, Placement, mesh_of
from octavo_jax.sharding.placement_of_call import check_axes


class ExpertRows(NamedTuple):
    """How the arrays of one call are turned into E blocks of rows, one for each shard of ep, and back.

    placement   of the E blocks; None if the arrays stay as the caller gave them
    """

    placement: Placement | None

    @classmethod
    def of(cls, sharding: MeshAxes | None, x: Array, group_sizes: GroupSizes) -> ExpertRows:
        """The ExpertRows of a call with x and these sizes.

        ValueError if x [M, K] has to be cut into blocks, and no mesh is known, or the mesh does not divide M or G.
        """
        if not isinstance(sharding, MeshAxes) or not sharding.ep or x.ndim != 2 or np.ndim(group_sizes) != 1:
            return cls(None)
        mesh = mesh_of(x)
        if mesh is None:
            raise ValueError(
                f"ep={sharding.ep!r} shards experts, x has shape {list(x.shape)} without an axis of expert blocks, and "
                "no mesh is in scope that says how many there are; call it under jax.set_mesh(mesh), or give x "
                "[E, M, K] and sizes [E, G]"
            )
        check_axes(sharding, mesh.axis_names)
        placement = Placement(sharding, mesh, ())
        experts = placement.shard_count(placement.non_manual(sharding.names("ep")))
        if experts == 1:
            return cls(None)
        rows, groups = x.shape[0], np.shape(group_sizes)[0]
        if rows % experts or groups % experts:
            raise ValueError(
                f"ep={sharding.ep!r} shards experts over {experts} and x has shape {list(x.shape)} for {groups} group "
                f"sizes; give numbers of rows and of groups that are multiples of {experts}, a device's own rows "
                "together, or x [E, M, K] and sizes [E, G]"
            )
        return cls(Placement(sharding, mesh, (experts,)))

    def in_blocks(self, name: str, array: Array, column: Letter | None) -> Array:
        """[M, C] as [E, M / E, C], and [M] as [E, M / E]; `column` is C's."""
        if self.placement is None:
            return array
        letters: tuple[Letter | None, ...] = ("e", column)
        flat = specs.spec_of(self.placement, letters[: array.ndim])
        array = placed(self.placement.mesh, name, array, flat, tokens=True)
        shape = (*self.placement.blocks, array.shape[0] // self.placement.blocks[0], *array.shape[1:])
        blocks: tuple[Letter | None, ...] = ("e", "m", column)
        return reshaped(self.placement, array, shape, specs.spec_of(self.placement, blocks[: array.ndim + 1]))

    def sizes(self, group_sizes: GroupSizes) -> GroupSizes:
        """[G] as [E, G / E]."""
        if self.placement is None:
            return group_sizes
        if not isinstance(group_sizes, jax.Array):
            return np.asarray(group_sizes).reshape(*self.placement.blocks, -1)
        shape = (*self.placement.blocks, group_sizes.shape[0] // self.placement.blocks[0])
        sizes = placed(self.placement.mesh, "group_sizes", group_sizes, specs.spec_of(self.placement, ("e",)))
        return reshaped(self.placement, sizes, shape, specs.sizes(self.placement))

    def out_of_blocks(self, y: Array) -> Array:
        """[E, M / E, N] as [M, N]."""
        if self.placement is None:
            return y
        return reshaped(
            self.placement, y, (y.shape[0] * y.shape[1], y.shape[2]), specs.spec_of(self.placement, ("e", "o"))
        )
