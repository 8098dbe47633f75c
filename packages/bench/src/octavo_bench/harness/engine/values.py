"""How the values that engines draw differ in size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def magnitude(count: int, width: int) -> F32:
    """0.5, 1, 2, 0.5, ... for runs of `width` elements: neighbouring scales differ, so a wrong one is seen."""
    return np.exp2(np.arange(count) // width % 3 - 1).astype(np.float32)
