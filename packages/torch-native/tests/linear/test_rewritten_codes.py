"""Codes that kernels write again between a forward and what reads them later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo import PRESETS
from octavo_torch import DelayedWgrad, QuantizedWeight, grouped_linear, grouped_mlp, moe_mlp, quantize, quantize_weight

G, K, F, N, M = 3, 64, 32, 48, 20
SIZES = torch.tensor([8, 0, 9])
CHOICES, ONES = torch.zeros(M, 1, dtype=torch.int64), torch.ones(M, 1)
BACKEND = "torch-native"


def result(name: str, x: torch.Tensor, w1: QuantizedWeight, w2: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    if name == "linear":
        return grouped_linear(x, w1, SIZES, **how)
    if name == "mlp":
        return grouped_mlp(x, w1, w2, SIZES, **how)
    return moe_mlp(x, CHOICES, ONES, w1, w2, form=name, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("recipe", ["fp8-row", "fp8-block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", ["linear", "mlp", "standard", "recompute"])
def test_a_backward_never_reads_later_codes(name: str, recipe: str, turned: bool, rng: np.random.Generator) -> None:
    """It raises as autograd does for any saved tensor that has changed; where a flag says that nothing has changed,
    codes and the gradient are as they were."""
    how: dict[str, Any] = {"recipe": PRESETS[recipe], "seed": 1, "backend": BACKEND}
    w1 = torch.randn(G, 2 * F, K).bfloat16()
    w1 = (w1.mT.contiguous().mT if turned else w1).requires_grad_()
    x, w2 = torch.randn(M, K).bfloat16().requires_grad_(), torch.randn(G, N, F).bfloat16()
    codes = quantize_weight(w1, **how)
    y = result(name, x, codes, w2, how)
    (expected,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    quantize_weight(w1, **how, out=codes, unchanged=torch.ones(1, dtype=torch.int32))
    (again,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert torch.equal(again, expected)
    with torch.no_grad():
        w1.mul_(2)
    quantize_weight(w1, **how, out=codes)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), x)


def test_a_postponed_gradient_never_reads_later_codes(rng: np.random.Generator) -> None:
    """Rows that the caller quantized, and quantizes again into the same memory before backward_dw."""
    recipe = PRESETS["mxfp8"]
    w = torch.randn(G, N, K).requires_grad_()
    quantizer = recipe.quantizer("x")
    assert quantizer is not None
    how: dict[str, Any] = {"layouts": ("rows", "panels"), "backend": BACKEND}
    codes, store = quantize(torch.randn(M, K), quantizer, SIZES, **how), DelayedWgrad()
    grouped_linear(codes, w, None, recipe=recipe, backend=BACKEND, delayed_wgrad=store).sum().backward()
    quantize(torch.randn(M, K), quantizer, SIZES, out=codes, **how)
    with pytest.raises(ValueError, match="that a delayed weight gradient reads has changed in place since backward"):
        store.backward_dw()
