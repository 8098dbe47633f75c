"""Explicit meshes, where the types of arrays say where they are: what fits the roles is used as it is, never gathered.

Called on a public function's own arguments, before its custom_vjp: a gradient has its argument's type, and the
transpose of a reshard puts it back there.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AxisType, PartitionSpec

from octavo_jax.array_moves.shares import Entries, entries_of, partition_spec_text
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
    sharding = jax.typeof(array).sharding
    current, target = _entries(sharding.spec, array.ndim, axes), _entries(spec, array.ndim, axes)
    if current == target:
        return array
    for axis, (now, then) in enumerate(zip(current, target, strict=True)):
        if now != then[: len(now)] or (tokens and now != then and not sharding.mesh.empty):
            needed = partition_spec_text(target)
            raise ValueError(
                f"{name} {list(array.shape)} is placed as {partition_spec_text(current)} and sharding needs {needed}: "
                f"its axis {axis} is cut over {now or 'nothing'}, not over {then or 'nothing'}; give "
                f"octavo_jax.MeshAxes roles that fit, or move the array first: "
                f"jax.sharding.reshard({name}, {needed})"
            )
    moved: jax.Array = jax.sharding.reshard(array, PartitionSpec(*target))  # type: ignore[no-untyped-call]
    return moved


def placed_as(before: Arrays, after: Arrays) -> Arrays:
    """`after`, a tree like `before`, with each array placed on Explicit axes as that of `before` is.

    So a state that a layer returns is placed as the one that it took, which a module that keeps it and a scan that
    carries it rely on. One call has computed all of its arrays, so the first tells whether there are such axes.
    """
    first = next(iter(jax.tree.leaves(after)), None)
    if first is None or not explicit_axes(jax.typeof(first).sharding.mesh):
        return after

    def moved(old: jax.Array, new: jax.Array) -> jax.Array:
        sharding = jax.typeof(new).sharding
        axes = explicit_axes(sharding.mesh)
        target = _entries(jax.typeof(old).sharding.spec, new.ndim, axes)
        if _entries(sharding.spec, new.ndim, axes) == target:
            return new
        return jax.sharding.reshard(new, PartitionSpec(*target))  # type: ignore[no-untyped-call, no-any-return]

    result: Arrays = jax.tree.map(moved, before, after)
    return result


class LayerArrays(NamedTuple):
    """The arrays that a grouped layer reads: x [*B, M, K], the kernel, bias [E * G, N], sizes [*B, G] and the state."""

    x: jax.Array
    kernel: jax.Array
    bias: jax.Array | None
    group_sizes: jax.Array
    state: DelayedState | None


def placed_layer(placement: Placement, weight: Weight, a: LayerArrays) -> LayerArrays:
    """`placed` of each of a grouped layer's arrays."""
    mesh = placement.mesh
    if not explicit_axes(mesh):
        return a
    return LayerArrays(
        x=placed(mesh, "x", a.x, specs.rows(placement, "i"), tokens=True),
        kernel=placed(mesh, "kernel", a.kernel, specs.kernel(placement, weight)),
        bias=None if a.bias is None else placed(mesh, "bias", a.bias, specs.groups(placement, columns="o")),
        group_sizes=placed(mesh, "group_sizes", a.group_sizes, specs.sizes(placement)),
        state=None if a.state is None else placed_state(placement, "state", a.state),
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
