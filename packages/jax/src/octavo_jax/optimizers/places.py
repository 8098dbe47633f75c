"""Explicit meshes: what reshapes a parameter's axes runs where XLA places arrays, and comes back in a stated place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from octavo_jax.sharding.explicit_placement import explicit_axes


def place_of(array: Array) -> NamedSharding | None:
    """Where an Explicit mesh has the array; None where no such mesh is."""
    place = jax.typeof(array).sharding
    return place if explicit_axes(place.mesh) else None


def with_whole_last_axis(place: NamedSharding | None) -> NamedSharding | None:
    """The place of what has one value for many of the last axis: cut as the other axes are."""
    if place is None:
        return None
    return NamedSharding(place.mesh, PartitionSpec(*place.spec[:-1], None))  # type: ignore[no-untyped-call]


def run_placed(function: Callable[..., Any], out: Any, *arguments: Any) -> Any:
    """`function` of these arguments, whose results lie as the tree `out` says; one without a place is on no such mesh.

    JAX refuses most reshapes of what an Explicit mesh has cut: inside, its axes are XLA's.
    """
    places = jax.tree.leaves(out)
    if not places:
        return function(*arguments)
    axes = tuple(sorted(explicit_axes(places[0].mesh)))
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=out)(*arguments)
