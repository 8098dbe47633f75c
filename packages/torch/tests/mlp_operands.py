"""What tests of MLPs share: recipes, drawn operands whose tails are NaN, states, and a comparison bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import MXFP8, PRESETS, BlockScaling, DelayedScaling, Recipe
from octavo_registry.contract.cards import GATED
from octavo_torch import DelayedState

REFERENCE = "torch-reference"
SIZES = [20, 0, 40]
M, K, F, N, G = 70, 64, 48, 80, len(SIZES)
USED = sum(SIZES)
RECIPES: dict[str, Recipe] = {
    **PRESETS,
    "fp8-delayed": DelayedScaling(history=4),
    "fp32 results": BlockScaling(output_dtype="float32"),
    "quantized backward": MXFP8(fprop="high_precision"),
    "quantized wgrad": MXFP8(fprop="high_precision", dgrad="high_precision"),
}


def operands(activation: str = "swiglu", dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Fresh leaves, with NaN past the sum."""
    inner = F * (2 if activation in GATED else 1)
    made = {
        "x": torch.randn(M, K).to(dtype),
        "w1": (torch.randn(G, inner, K) / 8).to(dtype),
        "w2": (torch.randn(G, N, F) / 8).to(dtype),
        "probs": torch.rand(M),
        "bias1": torch.randn(G, inner).to(dtype),
        "bias2": torch.randn(G, N).to(dtype),
        "bias2_scales": torch.rand(M),
    }
    for name in ("x", "probs", "bias2_scales"):
        made[name][USED:] = torch.nan
    return {name: value.requires_grad_() for name, value in made.items()}


def states_of(recipe: Recipe) -> tuple[DelayedState, DelayedState] | None:
    if not recipe.stateful:
        return None
    first, second = DelayedState.create(recipe, G), DelayedState.create(recipe, G)  # type: ignore[arg-type]
    for state in (first, second):
        state.scale.copy_(torch.rand(3, G) + 0.5)
    return first, second


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    for ours, theirs in zip(left, right, strict=True):
        assert torch.equal(ours, theirs)
