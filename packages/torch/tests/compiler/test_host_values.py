"""What a training step looks at on the host: no value of a tensor, except for sizes that are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from octavo import PRESETS
from octavo_torch import GroupedLinear, GroupedMLP, update_scales

G, K, N, F, M = 3, 64, 48, 32, 40
SIZES = torch.tensor([15, 0, 20])
READING = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[tuple[torch.dtype, torch.Size]]:
    """Dtypes and shapes of the tensors that a method of theirs has read, in forward or backward."""
    found: set[tuple[torch.dtype, torch.Size]] = set()

    def noting(method: Any) -> Any:
        def noted(value: Tensor, *args: Any, **kwargs: Any) -> Any:
            found.add((value.dtype, value.shape))
            return method(value, *args, **kwargs)

        return noted

    for name in READING:
        monkeypatch.setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_a_step_reads_no_value_but_sizes(
    name: str, read: set[tuple[torch.dtype, torch.Size]], rng: np.random.Generator
) -> None:
    """Forward, backward and the next scales look at no scale, amax or seed: on a GPU each look would wait for the
    device, and a CUDA graph would hold what was seen (faults.md 36)."""
    options: dict[str, Any] = {"recipe": PRESETS[name], "seed": 3, "backend": "torch-reference"}
    layers = nn.ModuleList([GroupedLinear(G, K, N, bias=True, **options), GroupedMLP(G, N, F, **options)])
    x, probs = torch.randn(M, K, requires_grad=True), torch.rand(M, requires_grad=True)
    read.clear()
    for _ in range(2):
        layers[1](layers[0](x, SIZES), SIZES, probs).square().sum().backward()
        update_scales(layers)
    assert read <= {(SIZES.dtype, SIZES.shape)}
    assert read, "sizes on the host are read, so nothing was seen"
