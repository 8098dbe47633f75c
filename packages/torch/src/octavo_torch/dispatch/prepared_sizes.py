"""Group sizes as backends prepare them: once per call, for all operations that take the same."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from octavo_registry.contract.arrays import Prepare

PrepareFunction = Prepare[Tensor]


def shared_prepare(prepares: Iterable[PrepareFunction | None]) -> PrepareFunction | None:
    """The one function that prepares group sizes for all operations of a call.

    None, for sizes as they are, where the operations do not share one: sizes that one backend has prepared are nothing
    to another.
    """
    first, *others = [*prepares] or [None]
    return first if all(other == first for other in others) else None
