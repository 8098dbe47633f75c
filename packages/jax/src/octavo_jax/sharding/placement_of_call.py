"""The placement of a call, from its arguments and the mesh in scope, and how one of its arrays should be placed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from octavo.caller import Place
from octavo_jax.array_moves.moves import CalledFunction, WantedPlacement
from octavo_jax.array_moves.shares import MeshShape, entries_of
from octavo_jax.sharding.axes import ROLES, MeshAxes
from octavo_jax.sharding.placement import Placement, mesh_of

NO_AXES = MeshAxes()
MOST_BLOCK_AXES = 2


def placement_of(
    sharding: MeshAxes | None, group_sizes: Array | np.ndarray | Sequence[Any], x: Array, kernel: Array
) -> Placement | None:
    """The placement of x [*B, M, K], a kernel and sizes [*B, G]; None for rows and a kernel on one device.

    ValueError where the mesh lacks an axis, or x and the sizes have other leading axes.
    """
    blocks = np.shape(group_sizes)[:-1]
    if blocks and (len(blocks) > MOST_BLOCK_AXES or x.shape[:-2] != blocks):
        raise ValueError(
            f"group_sizes has shape {list(np.shape(group_sizes))} and x {list(x.shape)}; they are [*B, G] and "
            "[*B, M, K] with the same axes B, at most two: expert blocks and data blocks"
        )
    axes = NO_AXES if sharding is None else sharding
    experts = len(blocks) == 1 and kernel.shape[0] == blocks[0] * np.shape(group_sizes)[-1] > np.shape(group_sizes)[-1]
    if not axes.every:
        return Placement(NO_AXES, None, blocks, experts) if blocks else None
    mesh = mesh_of(x, kernel)
    if mesh is not None:
        check_axes(axes, mesh.axis_names)
    return Placement(axes, mesh, blocks, experts)


def check_axes(axes: MeshAxes, there: tuple[str, ...]) -> None:
    """ValueError where a role names an axis that the mesh does not have."""
    for role in ROLES:
        for name in axes.names(role):
            if name not in there:
                raise ValueError(
                    f"{role}={getattr(axes, role)!r} names the mesh axis {name!r} and the mesh has "
                    f"{', '.join(map(repr, there))}; name one of these, or enter the mesh with jax.set_mesh"
                )


def wanted_placement(
    called: CalledFunction, placement: Placement | None, name: str, array: Array, spec: PartitionSpec, place: Place
) -> WantedPlacement | None:
    """How the argument `name` of a layer should be placed; None where its type says it, or the caller has cut it.

    spec   from `octavo_jax.sharding.specs`; without roles that of an array which every device has whole
    """
    mesh = mesh_of(array) if placement is None or placement.route == "single" else placement.mesh
    if mesh is not None:
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if AxisType.Auto not in kinds.values():
            return None
        mesh = MeshShape.of(mesh, frozenset(name for name, kind in kinds.items() if kind == AxisType.Manual))
    entries = None
    if placement is not None and placement.axes.every:
        entries = entries_of(spec, array.ndim)
        if placement.mesh_unknown:
            entries = tuple(sum(map(placement.axes_of, letters), ()) for letters in entries)  # type: ignore[arg-type]
    return WantedPlacement(called.function, name, mesh, entries, called.moves, place)
