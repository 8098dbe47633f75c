"""Where the arguments of a layer are, as far as that is known before XLA compiles, and which would have to move."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from octavo.caller import place_of_caller
from octavo_jax.array_moves.moves import CalledFunction, Move
from octavo_jax.array_moves.probe import move_of_array
from octavo_jax.array_moves.shares import entries_of, partition_spec_text
from octavo_jax.arrays.sizes import GroupSizes
from octavo_jax.sharding import specs
from octavo_jax.sharding.placement import Placement
from octavo_jax.sharding.placement_of_call import wanted_placement
from octavo_registry import Weight

UNKNOWN = "traced, so that its place is not known before XLA partitions the program"


class ArgumentPlacements(NamedTuple):
    """placed: where each argument is, in words; misplaced: what has to move before the layer can run."""

    placed: Mapping[str, str]
    misplaced: tuple[Move, ...]

    @classmethod
    def of(
        cls,
        called: CalledFunction,
        placement: Placement | None,
        weight: Weight,
        x: Array,
        kernel: Array,
        group_sizes: GroupSizes,
    ) -> ArgumentPlacements:
        """Of the arguments of `octavo_jax.grouped_dense`."""
        arrays: dict[str, Any] = {"x": x, "kernel": kernel, "group_sizes": group_sizes}
        wanted: dict[str, PartitionSpec] = dict.fromkeys(arrays, specs.WHOLE)
        if placement is not None:
            needs = specs.rows(placement, "i"), specs.kernel(placement, weight), specs.sizes(placement)
            wanted = dict(zip(arrays, needs, strict=True))
        moves = (_move(called, placement, name, array, wanted[name]) for name, array in arrays.items())
        placed = {name: _in_words(array) for name, array in arrays.items()}
        return cls(MappingProxyType(placed), tuple(move for move in moves if move is not None))


def _move(
    called: CalledFunction, placement: Placement | None, name: str, array: Any, spec: PartitionSpec
) -> Move | None:
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return None
    wanted = wanted_placement(called, placement, name, array, spec, place_of_caller())
    return None if wanted is None else move_of_array(array, wanted)


def _in_words(array: Any) -> str:
    if not isinstance(array, jax.Array):
        return "on the host"
    if isinstance(array, jax.core.Tracer):
        sharding = jax.typeof(array).sharding
        if sharding.mesh.empty or set(sharding.mesh.axis_types) == {AxisType.Auto}:
            return UNKNOWN
        if AxisType.Manual in sharding.mesh.axis_types:
            return "a shard of the caller's own"
        return f"placed as {partition_spec_text(entries_of(sharding.spec, array.ndim))}"
    spec = getattr(array.sharding, "spec", None)
    if spec is not None:
        return f"placed as {partition_spec_text(entries_of(spec, array.ndim))}"
    return f"on {len(array.devices())} device{'s' * (len(array.devices()) > 1)}"
