"""How a local function reaches the shards: called where it stands, or inside one shard_map.

A local function takes and returns the arrays of one shard and names mesh axes in its collectives. On one device, and
where the caller is manual over every axis, it is called as it is. Else it runs in a shard_map over all axes that the
caller is not manual over yet, which serves Auto and Explicit meshes and, nested, a partly manual caller. Where no mesh
is known until XLA partitions the program, `octavo_jax.sharding.custom_partitioning` does the same then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from octavo_jax.arrays.varying import varying_axes, varying_over
from octavo_jax.sharding.custom_partitioning import run_partitioned_later
from octavo_jax.sharding.placement import Placement


def run_on_shards(
    placement: Placement,
    local: Callable[..., Any],
    operands: tuple[Any, ...],
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Any:
    """`local` of every shard's operands; specs are of `octavo_jax.sharding.specs`, pytree prefixes as shard_map's."""
    if placement.mesh_unknown:
        return run_partitioned_later(placement, local, operands, in_specs, out_specs)
    if not placement.non_manual_axes:
        return local(*operands)
    mapped = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(placement.non_manual_axes),
        check_vma=False,
    )
    # Unchecked inside; the caller's own manual axes, where they are checked, are in the types again outside.
    return varying_over(mapped(*operands), varying_axes(operands))
