"""Arrays that have to move before a layer can read them, and the warning or error that says so, with the bytes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from octavo.caller import Place
from octavo_jax.array_moves.shares import (
    Entries,
    MeshShape,
    elements_to_fetch,
    entries_of_shares,
    partition_spec_text,
    shares_of_entries,
)

Policy = Literal["warn", "error", "allow"]
POLICIES: tuple[Policy, ...] = ("warn", "error", "allow")


class MoveWarning(UserWarning):
    """An array is not placed as a layer reads it, so that XLA moves it between devices at every call.

    `warnings.filterwarnings("error", category=octavo_jax.MoveWarning)` makes an error of it, as
    `octavo_jax.MeshAxes(moves="error")` does.
    """


class CalledFunction(NamedTuple):
    """A public function that was called: what messages call it and its arguments, and its policy on arrays that move.

    function          the public function that was called
    x, kernel, bias   the names of its arguments
    moves             see MeshAxes
    """

    function: str
    x: str = "x"
    kernel: str = "kernel"
    bias: str = "bias"
    moves: Policy = "warn"


@dataclass(frozen=True)
class WantedPlacement:
    """How one array of a layer should be placed.

    function   the public function that reads it
    array      the name that this function has for it
    mesh       None: it is not known before the program is lowered
    entries    None: whole on every device, because no mesh axis has a role
    policy     what happens where it is placed otherwise: a warning, an error or nothing
    place      the line that called the function
    """

    function: str
    array: str
    mesh: MeshShape | None
    entries: Entries | None
    policy: Policy
    place: Place

    def with_axis(self, at: int) -> WantedPlacement:
        """The same for an array with one more dimension, at this place, which is cut over no mesh axis."""
        if self.entries is None:
            return self
        return replace(self, entries=(*self.entries[:at], (), *self.entries[at:]))

    def shares(self, shape: Sequence[int], devices: int) -> np.ndarray:
        """The part of an array of this shape that each device reads."""
        if self.entries is None or self.mesh is None:
            return shares_of_entries(MeshShape(("all",), (devices,)), ((),) * len(shape), shape)
        return shares_of_entries(self.mesh, self.entries, shape)


@dataclass(frozen=True)
class Move:
    """An array that is placed otherwise than a layer reads it. Printable.

    placed           "P('ep', None)", or in words where no PartitionSpec says it
    wanted           likewise
    bytes_received   the most that a device lacks of what it reads
    """

    function: str
    array: str
    shape: tuple[int, ...]
    placed: str
    wanted: str
    bytes_received: int
    has_roles: bool

    def __str__(self) -> str:
        what = f"{self.array} {list(self.shape)} is placed as {self.placed} and"
        moves = f"a device fetches {self.bytes_received} bytes of it from others"
        if not self.has_roles:
            return f"{what} no mesh axis has a role, so that every device reads all of it: {moves}"
        return f"{what} sharding needs {self.wanted}: {moves}"

    @property
    def sentence(self) -> str:
        """The message of a warning or error: the move, the function that needs it, and what to do."""
        fix = (
            f"place {self.array} as {self.wanted}, or give octavo_jax.MeshAxes roles that fit"
            if self.has_roles
            else "say what part each mesh axis plays, with sharding=octavo_jax.MeshAxes(...) or octavo_jax.mesh_roles"
        )
        return f"{self.function}: {self}; {fix} (octavo_jax.MeshAxes(moves='allow') accepts it)"


def move_of(wanted: WantedPlacement, shape: Sequence[int], itemsize: int, held: np.ndarray) -> Move | None:
    """The move that an array needs whose shares on the devices are `held`; None where each device has what it reads."""
    number = elements_to_fetch(held, wanted.shares(shape, len(held)))
    if number == 0:
        return None
    found = None if wanted.mesh is None else entries_of_shares(wanted.mesh, held, shape)
    placed = _in_words(held, shape) if found is None else partition_spec_text(found)
    target = partition_spec_text(((),) * len(shape) if wanted.entries is None else wanted.entries)
    has_roles = wanted.entries is not None
    return Move(wanted.function, wanted.array, tuple(shape), placed, target, number * itemsize, has_roles)


def _in_words(shares: np.ndarray, shape: Sequence[int]) -> str:
    counts = [len(np.unique(shares[:, dim, 0])) for dim in range(len(shape))]
    cuts = [f"axis {dim} in {count}" for dim, count in enumerate(counts) if count > 1]
    return f"cut along {' and '.join(cuts)}" if cuts else "on some of the devices"


_warned: dict[Any, Any] = {}  # as a module's __warningregistry__, for Python's rule of one warning per place


def report_move(move: Move, policy: Policy, place: Place) -> None:
    """Do what `policy` says about a move: raise ValueError, warn at `place`, or nothing."""
    if policy == "error":
        raise ValueError(move.sentence)
    if policy == "warn":
        warnings.warn_explicit(move.sentence, MoveWarning, place.file, place.line, registry=_warned)
