"""What tests of MoE layers share: drawn operands, recipes, and the layer as three operations in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo import MXFP8, PRESETS, BlockScaling, DelayedScaling, Recipe
from octavo_registry.contract.cards import GATED
from octavo_torch import DelayedState, grouped_mlp, permute, unpermute

REFERENCE = "torch-reference"
FORMS = ("standard", "keep_all", "recompute", "lean")
T, C, G, K, F, N = 37, 3, 5, 64, 48, 80
RECIPES: dict[str, Recipe] = {
    **PRESETS,
    "fp8-delayed": DelayedScaling(history=4),
    "fp32 results": BlockScaling(output_dtype="float32"),
    "quantized backward": MXFP8(fprop="high_precision"),
    "quantized wgrad": MXFP8(fprop="high_precision", dgrad="high_precision"),
    "delayed, quantized backward": DelayedScaling(history=4, fprop="high_precision"),
}


def draw(rng: np.random.Generator, activation: str = "swiglu", tokens: int = T) -> tuple[dict[str, Tensor], Tensor]:
    """Fresh leaves by their names in moe_mlp, and choices: some are routed nowhere, and expert 1 gets none."""
    index = np.stack([rng.permutation([0, 2, 3, 4])[:C] for _ in range(tokens)]) if tokens else np.zeros((0, C), int)
    index[rng.random(index.shape) < 0.2] = rng.choice([-1, G, 1000])
    inner = F * (2 if activation in GATED else 1)
    made = {
        "x": torch.randn(tokens, K).bfloat16(),
        "weights": torch.rand(tokens, C),
        "w1": (torch.randn(G, inner, K) / 8).bfloat16(),
        "w2": (torch.randn(G, N, F) / 8).bfloat16(),
        "bias1": torch.randn(G, inner).bfloat16(),
        "bias2": torch.randn(G, N).bfloat16(),
    }
    return {name: value.requires_grad_() for name, value in made.items()}, torch.from_numpy(index)


def states_of(recipe: Recipe) -> tuple[DelayedState, DelayedState] | None:
    """States with scales other than 1, where the recipe has some."""
    if not isinstance(recipe, DelayedScaling):
        return None
    first, second = DelayedState.create(recipe, G), DelayedState.create(recipe, G)
    for state in (first, second):
        state.scale.copy_(torch.rand(3, G) + 0.5)
    return first, second


def composed(given: dict[str, Any], choices: Tensor, **call: Any) -> Tensor:
    """The same from permute, grouped_mlp and unpermute."""
    x, weights, bias2 = given["x"], given["weights"], given.get("bias2")
    rows, sizes, routing = permute(x, choices, G, backend=call["backend"])
    probs = routing.to_rows(weights, backend=call["backend"])
    y = grouped_mlp(
        rows, given["w1"], given["w2"], sizes, probs=probs, bias1=given.get("bias1"), bias2=bias2,
        bias2_scales=None if bias2 is None else probs, **call,
    )  # fmt: skip
    return unpermute(y, routing, backend=call["backend"])


def assert_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """The same bits, and dtypes."""
    for number, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        assert ours.dtype is theirs.dtype, number
        differ = (ours != theirs).nonzero().tolist()
        assert torch.equal(ours, theirs), f"result {number}: {len(differ)} of {ours.numel()} differ, at {differ[:8]}"
