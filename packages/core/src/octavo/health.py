"""Names of the counts that say what quantization loses, and the numbers that people read, computed from them.

Front ends do the counting; octavo_numerics.TensorStats defines each count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FIELDS = ("elements", "amax", "non_finite", "saturated", "underflow", "signal", "noise", "inexact")
"""The counts of one operand and group, in the order in which arrays hold them."""

WINDOW = 128
"""A sample consists of windows of so many rows or columns, which start at multiples of it: no scaling block is cut."""

COLUMN_WINDOWS = 8
"""The most windows of columns in a sample, evenly spread. Scales of whole rows or columns need all columns."""


def numbers_of(counts: Sequence[float]) -> dict[str, float]:
    """The numbers to log, from counts in the order of FIELDS; empty where no element was looked at.

    There are always amax and non_finite, a number of elements. A quantized operand also has saturated and underflow, as
    shares of the elements that were looked at; sqnr_db, unless there is no signal or no noise; and inexact, a number of
    elements, unless it is 0.
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
