"""Recipes whose products the CUDA kernels emulate, and the devices on which values have the bits of codes."""

from __future__ import annotations

import pytest
from cuda_device import MARKS

from octavo import MXFP8, NVFP4, Recipe

RECIPES: dict[str, Recipe] = {
    "mxfp8": MXFP8(),
    "mxfp8 gradients in e5m2": MXFP8(gradient_format="e5m2"),
    "mxfp8 square weights": MXFP8(square_weights=True),
    "mxfp8 with dgrad in bf16": MXFP8(dgrad="high_precision"),
    "mxfp8 with wgrad in bf16": MXFP8(wgrad="high_precision"),
    "nvfp4": NVFP4(),
}
CASES = [
    *((name, "cpu") for name in RECIPES if name.startswith("mxfp8")),
    *(pytest.param(name, "cuda", marks=MARKS) for name in RECIPES),
]
"""Of a recipe and a device. On a CPU NVFP4's values are rounded with the second level inside."""
