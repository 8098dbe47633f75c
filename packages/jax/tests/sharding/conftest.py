"""Meshes of the devices at hand, arrays on them, and what several sharding tests share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MakeMesh = Callable[..., Mesh]


@pytest.fixture(scope="session")
def mesh_of() -> MakeMesh:
    """`mesh_of(ep=2, fsdp=4)`: a mesh of these axes, powers of two; `kind` is AxisType.Auto or Explicit.

    Where there are fewer devices (a conftest makes eight of a CPU) the longest axis is halved until they suffice: the
    mesh tells its lengths.
    """

    def make(kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
        if jax.device_count() == 1:
            pytest.skip("one device: nothing to shard over")
        while math.prod(axes.values()) > jax.device_count():
            axes[max(axes, key=axes.__getitem__)] //= 2
        devices = jax.devices()[: math.prod(axes.values())]
        return jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes), devices=devices)

    return make


@pytest.fixture(scope="session")
def placed() -> Callable[..., list[Any]]:
    """`placed(mesh, arrays, specs)`: the arrays on the mesh."""

    def place(mesh: Mesh, arrays: Sequence[Any], specs: Sequence[PartitionSpec]) -> list[Any]:
        return [jax.device_put(one, NamedSharding(mesh, spec)) for one, spec in zip(arrays, specs, strict=True)]

    return place
