"""Which part of an array a device holds, against JAX's own shardings, and how much of another part it lacks."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from octavo_jax.array_moves.shares import (
    MeshShape,
    elements_to_fetch,
    entries_of,
    entries_of_shares,
    partition_spec_text,
    shares_of_entries,
    shares_of_slices,
    shares_of_tiles,
)

SHAPE = (8, 12, 16)
SPECS = [P(), P("a"), P(None, "c", "b"), P(("c", "a"), None, "b"), P(None, None, ("b", "a", "c")), P("b", ("a", "c"))]


@pytest.fixture
def mesh() -> Any:
    if jax.device_count() < 8:
        pytest.skip("fewer than eight devices")
    return jax.make_mesh((2, 2, 2), ("a", "b", "c"), (jax.sharding.AxisType.Auto,) * 3, devices=jax.devices()[:8])


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shares_are_jaxs(spec: P, mesh: Any) -> None:
    """By a PartitionSpec, by indices and by XLA's own tiles, and the spec is found in them again."""
    sharding = NamedSharding(mesh, spec)
    here, entries = MeshShape.of(mesh), entries_of(spec, len(SHAPE))
    slices = sharding.devices_indices_map(SHAPE)
    wanted = shares_of_slices([slices[device] for device in mesh.devices.flat], SHAPE)
    np.testing.assert_array_equal(shares_of_entries(here, entries, SHAPE), wanted)
    tiles = sharding._to_xla_hlo_sharding(len(SHAPE))
    if tiles.is_tiled():
        np.testing.assert_array_equal(shares_of_tiles(tiles, SHAPE), wanted)
    assert entries_of_shares(here, wanted, SHAPE) == entries


def test_what_no_spec_says_has_no_entries(mesh: Any) -> None:
    """Devices in an order that no mesh axis has."""
    here = MeshShape.of(mesh)
    shares = shares_of_entries(here, entries_of(P(("a", "b", "c")), 1), (8,))
    assert entries_of_shares(here, shares[[1, 0, 2, 3, 4, 5, 6, 7]], (8,)) is None


@pytest.mark.parametrize("held", SPECS, ids=str)
@pytest.mark.parametrize("wanted", SPECS, ids=str)
def test_elements_to_fetch(held: P, wanted: P, mesh: Any) -> None:
    """As many as sets of the elements' own numbers say; none where the wanted share is in the one that is held."""
    here = MeshShape.of(mesh)
    shares = [shares_of_entries(here, entries_of(spec, len(SHAPE)), SHAPE) for spec in (held, wanted)]
    numbers = np.arange(math.prod(SHAPE)).reshape(SHAPE)
    sets = [[set(numbers[tuple(slice(*r) for r in ranges)].ravel()) for ranges in each] for each in shares]
    assert elements_to_fetch(*shares) == max(len(then - now) for now, then in zip(*sets, strict=True))


def test_shapes_that_do_not_divide() -> None:
    """As XLA cuts them: shards of the rounded length, the last ones short or empty."""
    shares = shares_of_entries(MeshShape(("a",), (4,)), (("a",),), (5,))
    np.testing.assert_array_equal(shares[:, 0], [[0, 2], [2, 4], [4, 5], [5, 5]])


def test_spelled() -> None:
    """As it is typed."""
    assert partition_spec_text((("a", "b"), (), ("c",))) == "P(('a', 'b'), None, 'c')"
