"""QuantizedArray: codes and scales of one operand, in the plain layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo import GroupedTensorSpec
from octavo.quantizer import Direction

PLANES = ("rowwise", "rowwise_scale", "rowwise_global", "columnwise", "columnwise_scale", "columnwise_global")
"""Array fields of a quantized tensor; those of a direction that was not requested are None."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedArray:
    """A quantized grouped tensor. Shapes are those of `GroupedTensorSpec`; each plane may be None.

    rowwise            payload: float8_e4m3fn, float8_e5m2, or uint8 with an E2M1 code in the low nibble
    rowwise_scale      decode scales: float32; uint8 exponent bytes (MXFP8); float8_e4m3fn (NVFP4)
    rowwise_global     [G] float32, NVFP4's second-level decode factors
    columnwise...      the same for data blocked along rows; the same objects where both directions share codes
    group_sizes        [G] int64; None for stacked matrices
    spec               shape, groups, quantizer

    Elements past the sum of the sizes (payload rows, scale rows, blocks that no group has) are zeros here and
    unspecified elsewhere: compare through `valid`.
    """

    spec: GroupedTensorSpec
    group_sizes: npt.NDArray[np.int64] | None = None
    rowwise: Array | None = None
    rowwise_scale: Array | None = None
    rowwise_global: Array | None = None
    columnwise: Array | None = None
    columnwise_scale: Array | None = None
    columnwise_global: Array | None = None

    def plane(self, direction: Direction) -> tuple[Array, Array, Array | None]:
        """(payload, scale, global) of a direction; ValueError where it was not produced."""
        payload, scale = getattr(self, direction), getattr(self, f"{direction}_scale")
        if payload is None or scale is None:
            present = ", ".join(name for name in ("rowwise", "columnwise") if getattr(self, name) is not None)
            raise ValueError(
                f"direction={direction!r} was not produced; this tensor has {present or 'no plane'}, so ask for "
                f"that or quantize with orientation={direction!r} or 'both'"
            )
        return payload, scale, getattr(self, f"{direction}_global")
