"""Planes in other layouts: the same bits, and no copy of what stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import MXFP8, CurrentScaling, Recipe
from octavo_torch import convert_layout, dequantize, quantize
from octavo_torch.arrays.grouped_tensor import PLANES

NATIVE = ("rows", "panels")


@pytest.mark.parametrize("recipe", [MXFP8(), CurrentScaling()], ids=lambda recipe: recipe.kind)
@pytest.mark.parametrize("layouts", [("plain", "panels"), ("rows", "plain")])
def test_planes_that_stay_are_shared(recipe: Recipe, layouts: Any) -> None:
    """And those that do not come back with the bits that they had."""
    spec = recipe.quantizer("x")
    assert spec is not None
    made = quantize(torch.randn(40, 64), spec, [30, 10], layouts=NATIVE, backend="torch-native")
    converted = convert_layout(made, layouts, backend="torch-native")
    assert (converted.spec.rowwise_layout, converted.spec.columnwise_layout) == layouts
    for direction, before, after in zip(("rowwise", "columnwise"), NATIVE, layouts, strict=True):
        names = [name for name in PLANES if name.startswith(direction) and getattr(made, name) is not None]
        assert names
        if before == after:
            assert all(getattr(converted, name) is getattr(made, name) for name in names)
        values = [dequantize(q, direction=direction, backend="torch-native") for q in (made, converted)]  # type: ignore[arg-type]
        assert torch.equal(*values)
