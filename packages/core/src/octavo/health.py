"""What is counted of a quantized tensor, and the numbers that people read; front ends count, this names.

octavo_numerics.TensorStats defines each count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FIELDS = ("elements", "amax", "non_finite", "saturated", "underflow", "signal", "noise", "inexact")
"""The counts of one operand and group, in the order in which arrays hold them."""

WINDOW = 128
"""Rows or columns that a sample takes together, from a multiple of it in their group: no block of scales is cut."""

COLUMN_WINDOWS = 8
"""Windows of columns that a sample takes at most, evenly spread. Scales of whole rows or columns need all columns."""


def numbers_of(counts: Sequence[float]) -> dict[str, float]:
    """Numbers for a log of counts in the order of FIELDS; empty where nothing was looked at.

    amax and non_finite (a number of elements); where the operand is quantized also saturated and underflow, as shares
    of the elements looked at, and sqnr_db. An SQNR that does not exist, without a signal or noise, is left out, and so
    is inexact, a number of elements, where there are none.
    """
    values = dict(zip(FIELDS, map(float, counts), strict=True))
    elements = values["elements"]
    if not elements:
        return {}
    numbers = {"amax": values["amax"], "non_finite": values["non_finite"]}
    if values["signal"]:  # an operand that stays in high precision has none
        numbers |= {name: values[name] / elements for name in ("saturated", "underflow")}
        if values["noise"] and math.isfinite(values["signal"]):
            numbers["sqnr_db"] = 10 * math.log10(values["signal"] / values["noise"])
        if values["inexact"]:
            numbers["inexact"] = values["inexact"]
    return numbers
