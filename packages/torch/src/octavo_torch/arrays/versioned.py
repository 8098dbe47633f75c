"""Codes that know whether the tensors that they were made of have changed since."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import Self

import torch

from octavo_torch.arrays.per_group import Weights, leaves_of, version_of
from octavo_torch.compiler.tracing import is_plain
from octavo_torch.uncounted_steps import watch

_is_compiling = torch.compiler.is_compiling

_OUTDATED = -1
"""The version of a copy whose original was outdated: no tensor has it."""


class Versioned(ABC):
    """`version` is what `version_of` the tensors was when the codes were made.

    It is None if torch counts no versions of the tensors, and if a compiled graph has made the codes. The tensors of
    copies and pickles count changes anew, so these are outdated if the original was.
    """

    version: int | None

    @property
    @abstractmethod
    def made_of(self) -> Weights:
        """The tensors."""

    @property
    def outdated(self) -> bool:
        """Whether the tensors have changed in place since; False if that cannot be known."""
        if self.version is None or not is_plain(leaves_of(self.made_of)[0]):
            return False
        return version_of(self.made_of) != self.version

    def without_version(self) -> Self:
        """A copy for tensors that count changes anew, outdated where this is."""
        made = copy(self)
        made.version = _OUTDATED if self.outdated else None
        return made

    def version_for_graphs(self) -> int | None:
        """`version` as a pytree has it; None in a compiler's trace, where no tensor counts changes. There a number that
        is another one in each step would be a symbol of the graph, or compile it again."""
        return None if _is_compiling() else self.version

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "version": _OUTDATED if self.outdated else self.version}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if self.version not in (None, _OUTDATED):
            self.version = version_of(self.made_of)
            watch(filter(is_plain, leaves_of(self.made_of)))
