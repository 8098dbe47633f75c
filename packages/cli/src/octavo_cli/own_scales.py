"""Encode scales of delayed scaling for weights that no training step has recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import QuantizerSpec
from octavo.formats import FORMAT_MAX


def own_scales(weights: NDArray[Any], spec: QuantizerSpec) -> NDArray[np.float32] | None:
    """fp32 [G], from the amax of each expert of weights [G, N, K], where training takes them from earlier steps.

    1 for an expert whose amax is 0 or not finite. None for scalings that make their own scales.
    """
    if spec.scaling != "delayed":
        return None
    amax = np.array([np.abs(matrix.astype(np.float32)).max() for matrix in weights], dtype=np.float32)
    usable = np.isfinite(amax) & (amax > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        own = np.float32(FORMAT_MAX[spec.format]) / amax
    scales: NDArray[np.float32] = np.where(usable & np.isfinite(own), own, 1).astype(np.float32)
    return scales
