"""Group sizes as backends prepare them: once per call, for all operations that take the same."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from octavo_registry.contract.arrays import Prepare

PrepareFunction = Prepare[Tensor]


def shared_prepare(prepares: Iterable[PrepareFunction | None]) -> PrepareFunction | None:
    """The function that prepares group sizes for all operations of a call, if they all have the same one.

    Else None: the sizes are not prepared, because operations of another backend could not read them.
    """
    first, *others = [*prepares] or [None]
    return first if all(other == first for other in others) else None
