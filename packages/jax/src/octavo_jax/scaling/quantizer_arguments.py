"""The arguments of a quantizer other than its array and group sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jax import Array

from octavo.quantizer import Operand


class QuantizerArguments(NamedTuple):
    """The keywords of a backend's quantizer.

    seed          uint32 [2] words; None where it rounds to nearest
    operand       "x", "w" or "dy"
    group_offset  number of the first group
    scale         [G] encode scales of delayed scaling, else None
    """

    seed: Array | None
    operand: Operand
    group_offset: Array | np.uint32
    scale: Array | None

    def keywords(self) -> dict[str, Any]:
        """As a dict, for a call with `**`."""
        return self._asdict()
