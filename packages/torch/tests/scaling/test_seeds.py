"""A seed that is the caller's tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import octavo_registry
from octavo_torch import grouped_linear, grouped_mlp, moe_mlp

T, K, F, N, G = 9, 32, 32, 16, 2
SIZES = torch.tensor([5, 4])
CHOICES = torch.tensor([[0, 1]] * T)


def _moe(form: str) -> Callable[..., Tensor]:
    def run(x: Tensor, w1: Tensor, w2: Tensor, **how: Any) -> Tensor:
        return moe_mlp(x, CHOICES, torch.full((T, 2), 0.5), w1, w2, form=form, **how)  # type: ignore[arg-type]

    return run


CALLS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, w1, w2, **how: grouped_linear(x, w1, SIZES, **how),
    "mlp": lambda x, w1, w2, **how: grouped_mlp(x, w1, w2, SIZES, **how),
    **{form: _moe(form) for form in ("keep_all", "standard", "recompute")},
}


@pytest.mark.parametrize("backend", ["*", "torch-reference"])
@pytest.mark.parametrize("name", CALLS)
def test_a_caller_may_count_on_between_forward_and_backward(name: str, backend: str, rng: np.random.Generator) -> None:
    """Several microbatches' forwards come before the first backward in a pipeline: each gradient is rounded with the
    bits of its own forward's seed, and not all with those of the last."""
    given = torch.randn(T, K), torch.randn(G, 2 * F, K), torch.randn(G, N, F)
    counted, grads = torch.tensor(7), []
    for seed in (counted, 7):
        x, w1, w2 = (value.bfloat16().requires_grad_() for value in given)
        with octavo_registry.prefer(backend):
            y = CALLS[name](x, w1, w2, recipe="nvfp4", seed=seed)
        counted.add_(1)
        grads.append(torch.autograd.grad(y, (x, w1), torch.linspace(-1, 1, y.numel()).bfloat16().view(y.shape)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
