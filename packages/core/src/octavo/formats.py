"""Element formats: their names, their largest values, and the types of their scales.

Sources: FP8 E4M3 and E5M2 after Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433);
E2M1 and E8M0 after the OCP Microscaling Formats specification v1.0, sections 5.3 and 5.4.
"""

from __future__ import annotations

from typing import Literal

Format = Literal["e4m3", "e5m2", "e2m1"]
"""Payload formats. E4M3 is the finite variant ("fn": no infinity, one NaN pattern per sign)."""

ScaleFormat = Literal["fp32", "e8m0", "e4m3"]
"""Storage type of a decode scale."""

DType = Literal["bfloat16", "float16", "float32"]
"""High-precision tensor types, by the name that numpy, torch and JAX share."""

FORMAT_MAX: dict[Format, float] = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
"""Largest finite magnitude of each payload format."""

PAST_LARGEST: dict[Format, float] = {"e4m3": 464.0, "e5m2": 61440.0, "e2m1": 7.0}
"""Half a unit past the largest value: from here on it is saturation, not rounding, that changes a value."""
