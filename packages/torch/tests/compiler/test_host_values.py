"""What the front end looks at between operators: no value of a tensor, except for sizes that are on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from octavo import PRESETS
from octavo_torch import GroupedLinear, GroupedMLP, update_scales

G, K, N, F, M = 3, 64, 48, 32, 40
SIZES = torch.tensor([15, 0, 20])
READING = frozenset(
    {Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__}
)


class Reads(TorchFunctionMode):
    """The kinds of tensors that are read while it is active; it does not see into operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[torch.dtype, torch.Size]] = set()

    def __torch_function__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in READING:
            self.found.add((args[0].dtype, args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", PRESETS)
def test_a_step_reads_no_value_but_sizes(name: str, rng: np.random.Generator) -> None:
    """Forward, backward and the next scales look at no scale, amax or seed: on a GPU each look would wait for the
    device, and a CUDA graph would hold what was seen (faults.md 36)."""
    options: dict[str, Any] = {"recipe": PRESETS[name], "seed": 3, "backend": "torch-reference"}
    layer = nn.ModuleList([GroupedLinear(G, K, N, bias=True, **options), GroupedMLP(G, N, F, **options)])
    x, probs = torch.randn(M, K, requires_grad=True), torch.rand(M, requires_grad=True)
    with Reads() as reads:
        for _ in range(2):
            layer[1](layer[0](x, SIZES), SIZES, probs).square().sum().backward()
            update_scales(layer)
    assert reads.found <= {(SIZES.dtype, SIZES.shape)}, f"these were read: {reads.found}"
    assert reads.found, "sizes on the host are read, so nothing was seen"
