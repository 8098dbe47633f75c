"""Layers whose weights are codes, for the tests of their masters. Not tests."""

from __future__ import annotations

from typing import Any

import torch
from code_planes import planes
from torch import Tensor

from octavo_torch import GroupedMLP, dequantize, quantize_weight, quantized_parameters

REFERENCE = "torch-reference"
G, K, F, M = 3, 64, 48, 20
SIZES = [5, 0, 12]


def values_of(weight: Any) -> Tensor:
    """What codes stand for, in fp32."""
    return dequantize(weight.codes)


def make(recipe: str, coded: bool = True, **more: Any) -> GroupedMLP:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "backend": REFERENCE, "seed": 7, **more}
    if not coded:
        return GroupedMLP(G, K, F, recipe=recipe, **how)
    with quantized_parameters(recipe):
        return GroupedMLP(G, K, F, **how)


def codes_of_values(values: Tensor, recipe: str) -> list[Tensor]:
    """Of fp32 values as the definition has it: quantize(cast(master))."""
    return planes(quantize_weight(values.bfloat16().requires_grad_(), recipe, backend=REFERENCE))
