"""Explicit meshes, where the types of arrays say where they are: what fits the roles is used as it is, never gathered.

Called on a public function's own arguments, before its custom_vjp: a gradient has its argument's type, and the
transpose of a reshard puts it back there.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, PartitionSpec

from octavo_jax.layouts.shares import Entries, entries_of, spelled
from octavo_jax.scaling.delayed_state import DelayedState, ScalingHistory
from octavo_jax.sharding import specs
from octavo_jax.sharding.placement import Placement
from octavo_registry import Weight

Arrays = TypeVar("Arrays")

_Mesh = Any  # jax.sharding.AbstractMesh, which mypy takes for Any


def explicit_axes(mesh: _Mesh | None) -> frozenset[str]:
    """The axes of `mesh` that types of arrays name."""
    if mesh is None or mesh.empty:
        return frozenset()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in types if kind == AxisType.Explicit)


def placed(mesh: _Mesh | None, name: str, array: jax.Array, spec: PartitionSpec, *, tokens: bool = False) -> jax.Array:
    """The argument `name` placed as `spec` says on the Explicit axes of `mesh`; itself where there are none.

    Where it is whole and the spec cuts it, each device keeps its part and nothing moves. ValueError where it is cut
    otherwise, which would move it between devices.

    tokens   of x: ValueError too where it is whole on the mesh, for its gradient would be gathered
    """
    axes = explicit_axes(mesh)
    if not axes:
        return array
    lying = jax.typeof(array).sharding
    placed_on, target = _entries(lying.spec, array.ndim, axes), _entries(spec, array.ndim, axes)
    if placed_on == target:
        return array
    for axis, (now, then) in enumerate(zip(placed_on, target, strict=True)):
        if now != then[: len(now)] or (tokens and now != then and not lying.mesh.empty):
            raise ValueError(
                f"{name} {list(array.shape)} is placed as {spelled(placed_on)} and sharding needs {spelled(target)}: "
                f"its axis {axis} is cut over {now or 'nothing'}, not over {then or 'nothing'}; give "
                f"octavo_jax.MeshAxes roles that fit, or move the array first: "
                f"jax.sharding.reshard({name}, {spelled(target)})"
            )
    moved: jax.Array = jax.sharding.reshard(array, PartitionSpec(*target))  # type: ignore[no-untyped-call]
    return moved


def placed_as(given: Arrays, made: Arrays) -> Arrays:
    """`made`, a tree like `given`, with each array placed on Explicit axes as that of `given` is.

    So a state that a layer returns lies where the one that it took does, which a module that keeps it and a scan that
    carries it rely on. One call made all of its arrays, so the first tells whether there are such axes.
    """
    first = next(iter(jax.tree.leaves(made)), None)
    if first is None or not explicit_axes(jax.typeof(first).sharding.mesh):
        return made

    def moved(before: jax.Array, after: jax.Array) -> jax.Array:
        lying, place = jax.typeof(after).sharding, jax.typeof(before).sharding
        axes = explicit_axes(lying.mesh)
        target = _entries(place.spec, after.ndim, axes)
        if _entries(lying.spec, after.ndim, axes) == target:
            return after
        return jax.sharding.reshard(after, PartitionSpec(*target))  # type: ignore[no-untyped-call, no-any-return]

    result: Arrays = jax.tree.map(moved, given, made)
    return result


def placed_layer(
    placement: Placement,
    weight: Weight,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    group_sizes: jax.Array,
    state: DelayedState | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array, DelayedState | None]:
    """`placed` of all that a grouped layer takes, in this order from x on."""
    mesh = placement.mesh
    if not explicit_axes(mesh):
        return x, kernel, bias, group_sizes, state
    return (
        placed(mesh, "x", x, specs.rows(placement, "i"), tokens=True),
        placed(mesh, "kernel", kernel, specs.kernel(placement, weight)),
        None if bias is None else placed(mesh, "bias", bias, specs.groups(placement, columns="o")),
        placed(mesh, "group_sizes", group_sizes, specs.sizes(placement)),
        None if state is None else placed_state(placement, "state", state),
    )


def placed_state(placement: Placement, name: str, state: DelayedState) -> DelayedState:
    """`placed` of a layer's delayed state."""

    def history(operand: str) -> ScalingHistory:
        histories: ScalingHistory = getattr(state, operand)
        spec = specs.groups(placement, of_kernel=operand == "kernel")
        path = f"{name}.{operand}"
        return ScalingHistory(
            placed(placement.mesh, f"{path}.history", histories.history, PartitionSpec(None, *spec)),  # type: ignore[no-untyped-call]
            placed(placement.mesh, f"{path}.scale", histories.scale, spec),
        )

    return DelayedState(history("x"), history("kernel"), history("grad"))


def _entries(spec: Any, rank: int, axes: frozenset[str]) -> Entries:
    """The axes that a PartitionSpec names for each dimension, without those that are not among `axes`."""
    return tuple(tuple(name for name in names if name in axes) for names in entries_of(spec, rank))
