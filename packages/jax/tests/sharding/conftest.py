"""Meshes of virtual devices, arrays on them, and what several sharding tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MakeMesh = Callable[..., Mesh]


@pytest.fixture(scope="session")
def mesh_of() -> MakeMesh:
    """`mesh_of(ep=2, fsdp=4)`: a mesh of these axes; `kind` is AxisType.Auto or Explicit. A machine with fewer devices
    skips the test: XLA_FLAGS makes eight on a CPU."""

    def make(kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
        devices = int(np.prod(list(axes.values())))
        if devices > jax.device_count():
            pytest.skip(f"needs {devices} devices, this machine has {jax.device_count()}")
        return jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes), devices=jax.devices()[:devices])

    return make


@pytest.fixture(scope="session")
def placed() -> Callable[..., list[Any]]:
    """`placed(mesh, arrays, specs)`: the arrays on the mesh."""

    def place(mesh: Mesh, arrays: Sequence[Any], specs: Sequence[PartitionSpec]) -> list[Any]:
        return [jax.device_put(one, NamedSharding(mesh, spec)) for one, spec in zip(arrays, specs, strict=True)]

    return place
