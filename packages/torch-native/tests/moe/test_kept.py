"""bytes_kept says what a MoE layer keeps whose weights lie as [G, K, N], in layouts that are padded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from octavo import PRESETS, HighPrecision
from octavo_torch import MoeShape, bytes_kept, moe_mlp

T, C, G, K, F, N = 37, 3, 4, 96, 160, 128
BACKEND = "torch-native"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["bf16", "fp8-row", "mxfp8", "mxfp8-forward-only", "nvfp4"])
def test_every_byte_is_predicted(name: str, transposed: bool, rng: np.random.Generator) -> None:
    """The storages that autograd holds, without those of the weights: rows are padded to a tile, columns are not, and
    which is which depends on how a weight lies."""
    recipe = PRESETS.get(name, HighPrecision())
    shapes = (G, 2 * F, K), (G, N, F)
    w1, w2 = (
        (torch.randn(shape).bfloat16().mT.contiguous().mT if transposed else torch.randn(shape).bfloat16())
        for shape in shapes
    )
    parameters = {w.requires_grad_().untyped_storage().data_ptr() for w in (w1, w2)}
    x, weights = torch.randn(T, K).bfloat16().requires_grad_(), torch.rand(T, C).requires_grad_()
    choices = torch.from_numpy(rng.integers(0, G, (T, C)))
    for form in ("keep_all", "standard", "lean", "recompute"):
        for weight_codes in ("keep", "remake"):
            how: dict[str, Any] = {"form": form, "weight_codes": weight_codes, "backend": BACKEND}
            kept: dict[int, Tensor] = {}
            with saved_tensors_hooks(
                lambda value, kept=kept: kept.setdefault(value.untyped_storage().data_ptr(), value),
                lambda value: value,
            ):
                moe_mlp(x, choices, weights, w1, w2, recipe=recipe, seed=7, **how)
            measured = sum(
                value.untyped_storage().nbytes() for address, value in kept.items() if address not in parameters
            )
            predicted = bytes_kept(recipe, MoeShape(T, C, G, K, F, N), transposed=transposed, **how)
            assert measured == predicted.total, how
