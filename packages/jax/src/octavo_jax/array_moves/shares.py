"""The share of an array that each device of a mesh holds, and how much of it another placement would have to fetch.

Shares are half-open ranges, int64 [devices, rank, 2], devices in the order of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Entries = tuple[tuple[str, ...], ...]
"""The mesh axes that cut each dimension of an array, the outermost first."""


class MeshShape(NamedTuple):
    """The names and lengths of a mesh's axes, in the mesh's order."""

    names: tuple[str, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Any, without: frozenset[str] = frozenset()) -> MeshShape:
        """The shape of a `jax.sharding.Mesh` or AbstractMesh, leaving out the axes `without`."""
        names = tuple(name for name in mesh.axis_names if name not in without)
        return cls(names, tuple(int(mesh.shape[name]) for name in names))

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.lengths)


def entries_of(spec: Any, rank: int) -> Entries:
    """The axes of each dimension of an array of this rank that a PartitionSpec names."""
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return (*entries, *[()] * (rank - len(entries)))


def shares_of_entries(mesh: MeshShape, entries: Entries, shape: Sequence[int]) -> np.ndarray:
    """The shares of an array whose dimensions are cut over these axes."""
    places = np.indices(mesh.lengths).reshape(len(mesh.lengths), -1) if mesh.names else np.zeros((0, 1), np.int64)
    indices = np.zeros((places.shape[1], len(shape)), np.int64)
    counts = np.ones(len(shape), np.int64)
    for dim, names in enumerate(entries):
        for name in names:
            axis = mesh.names.index(name)
            indices[:, dim] = indices[:, dim] * mesh.lengths[axis] + places[axis]
            counts[dim] *= mesh.lengths[axis]
    return _ranges(indices, counts, shape)


def shares_of_tiles(tiles: Any, shape: Sequence[int]) -> np.ndarray:
    """The shares of an array that XLA's HloSharding `tiles` cuts."""
    dims = tuple(tiles.tile_assignment_dimensions())
    holders = np.asarray(tiles.tile_assignment_devices(), np.int64)
    # Dimensions after the array's own count copies: the devices along them hold the same tile.
    positions = np.stack(np.unravel_index(np.arange(holders.size), dims), axis=-1)[:, : len(shape)]
    indices = np.empty_like(positions)
    indices[holders] = positions
    return _ranges(indices, np.asarray(dims[: len(shape)], np.int64), shape)


def shares_of_slices(slices: Sequence[Sequence[slice]], shape: Sequence[int]) -> np.ndarray:
    """The shares that each device's index into the array, one slice for each dimension, stands for."""
    ranges = [[one.indices(length)[:2] for one, length in zip(own, shape, strict=True)] for own in slices]
    return np.asarray(ranges, np.int64).reshape(len(slices), len(shape), 2)


def _ranges(indices: np.ndarray, counts: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    lengths = np.asarray(shape, np.int64)
    steps = -(-lengths // counts)
    starts = np.minimum(indices * steps, lengths)
    return np.stack([starts, np.minimum(starts + steps, lengths)], axis=-1)


def elements_to_fetch(held: np.ndarray, wanted: np.ndarray) -> int:
    """The most elements of its wanted share that a device does not hold yet."""
    common = np.minimum(held[..., 1], wanted[..., 1]) - np.maximum(held[..., 0], wanted[..., 0])
    there = np.prod(np.maximum(common, 0), axis=-1)
    needed = np.prod(wanted[..., 1] - wanted[..., 0], axis=-1)
    return int(np.max(needed - there, initial=0))


def entries_of_shares(mesh: MeshShape, shares: np.ndarray, shape: Sequence[int]) -> Entries | None:
    """The axes that cut an array into these shares; None where no PartitionSpec of this mesh gives them."""
    if len(shares) != mesh.devices:
        return None
    entries = []
    for dim in range(len(shape)):
        starts = shares[:, dim, 0].reshape(mesh.lengths)
        steps = {}
        for axis, name in enumerate(mesh.names):
            apart = np.abs(np.diff(starts, axis=axis))
            if apart.any():
                steps[name] = int(apart.min())
        entries.append(tuple(sorted(steps, key=lambda name: -steps[name])))
    found = tuple(entries)
    return found if np.array_equal(shares_of_entries(mesh, found, shape), shares) else None


def partition_spec_text(entries: Entries) -> str:
    """The entries in words, as a PartitionSpec is written."""
    parts = (repr(entry[0]) if len(entry) == 1 else repr(entry) if entry else "None" for entry in entries)
    return f"P({', '.join(parts)})"
