"""What tests of main_grad share: a weight, microbatches whose tails are NaN, and a backward into the buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo import Recipe
from octavo_torch import DelayedState, grouped_linear

SIZES = [33, 0, 1, 70, 16]
M, K, N, G = 124, 48, 32, len(SIZES)
SEED = 7


def state_for(recipe: Recipe) -> DelayedState | None:
    return DelayedState.create(recipe, G) if recipe.stateful else None  # type: ignore[arg-type]


def parameter(dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.randn(G, N, K).to(dtype))


def microbatch(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """x and dy, whose rows past the sum are NaN."""
    x, dy = torch.randn(M, K).to(dtype), torch.randn(M, N).to(dtype)
    x[sum(SIZES) :] = dy[sum(SIZES) :] = torch.nan
    return x, dy


def backward(w: Any, x: Tensor, dy: Tensor, recipe: Recipe | None = None, **rest: Any) -> None:
    state = None if recipe is None else state_for(recipe)
    grouped_linear(x, w, SIZES, recipe=recipe, seed=SEED, state=state, **rest).backward(dy)
