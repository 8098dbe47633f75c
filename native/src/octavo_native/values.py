"""Which planes the CUDA kernels write as values: bf16 numbers that emulated GEMMs multiply, in the place of codes.

`octavo_native.layouts` has their shapes; the decisions 0062 and 0090 say who reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from octavo_native.layouts import LAYOUTS_OF_DIRECTION
from octavo_native.support import EMULATED_RECIPES


class Quantized(Protocol):
    """What is read of octavo.QuantizerSpec."""

    @property
    def scaling(self) -> str:
        """Of codes and scales."""

    @property
    def directions(self) -> Sequence[str]:
        """Of its planes."""

    @property
    def square(self) -> bool:
        """Scales of square blocks."""

    @property
    def stochastic(self) -> bool:
        """Random bits decide how codes are rounded."""

    @property
    def mxfp4(self) -> str | None:
        """The direction along which MXFP4's values come first; None: they do not."""


def multiplies_values(device: str) -> bool:
    """Whether the kernels of this device multiply bf16 copies of EMULATED_RECIPES: the CPU's multiply what codes stand
    for."""
    return device == "cuda"


def writes_values(quantizer: Quantized, direction: str, dtype: str, *, of_array: bool = True) -> bool:
    """Whether the kernels write the plane of this direction as values of what comes in `dtype`.

    of_array   what is quantized is an array: no prologue computes it, and no choices of a router gather its rows
    """
    if quantizer.scaling not in EMULATED_RECIPES or quantizer.mxfp4 is not None:
        return False
    if quantizer.scaling == "mxfp8" or direction == "rowwise":
        return True
    # NVFP4's kernels that turn values into columns hold two bytes per element
    return of_array and dtype != "float32" and not (quantizer.square and quantizer.stochastic)


def valued(
    quantizer: Quantized, layouts: Collection[str], dtype: str, device: str, *, of_array: bool
) -> tuple[str, ...]:
    """The directions of the quantizer's planes that GEMMs on this device can read as values.

    layouts   of its row data and of its column data: values stand for native codes alone
    dtype, of_array   as in `writes_values`
    """
    if not multiplies_values(device):
        return ()
    planes = zip(LAYOUTS_OF_DIRECTION.items(), layouts, strict=True)
    return tuple(
        direction
        for (direction, (_, native)), layout in planes
        if direction in quantizer.directions
        and layout == native
        and writes_values(quantizer, direction, dtype, of_array=of_array)
    )
