"""permute and unpermute on a GPU: the bits of the CPU, and no wait. Skipped where torch sees no CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo_torch import permute, unpermute
from octavo_torch.compiler.graphs import no_waiting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

G = 5


def results(x: Tensor, index: Tensor, weights: Tensor, dy: Tensor, given: bool) -> list[Tensor]:
    """Rows, y and gradients; NaN stands in what no layer would write."""
    leaves = [value.detach().requires_grad_() for value in (x, weights)]
    rows, sizes, routing = permute(leaves[0], index, G)
    inside = torch.arange(rows.shape[0], device=rows.device)[:, None] < sizes.sum()
    if given:
        y = unpermute(torch.where(inside, rows * 2, torch.nan), routing, leaves[1])
    else:
        scaled = (rows.float() * routing.to_rows(leaves[1])[:, None]).to(rows.dtype)
        y = unpermute(torch.where(inside, scaled, torch.nan), routing)
    return [rows.detach(), sizes, y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "probs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["all", "some", "none", "no tokens"])
def test_the_bits_of_the_cpu(kind: str, dtype: torch.dtype, *, weighted: bool, rng: np.random.Generator) -> None:
    """Sums in fp32 in the order of choices, whoever adds; choices that are routed nowhere cost nothing (faults.md 18,
    36, 61)."""
    tokens, k = (0 if kind == "no tokens" else int(rng.integers(1, 200))), int(rng.integers(1, 4))
    index = torch.from_numpy(rng.integers(0, G, (tokens, k)))
    if kind != "all":
        index[torch.from_numpy(rng.random((tokens, k)) < (1.0 if kind == "none" else 0.6))] = -1
    x, dy = torch.randn(tokens, 264).to(dtype), torch.randn(tokens, 264).to(dtype)
    given = x, index, torch.rand(tokens, k), dy
    expected = results(*given, weighted)
    there = [value.cuda() for value in given]
    results(*there, weighted)  # what is set up once may wait
    with no_waiting():
        made = results(*there, weighted)
    names = ("rows", "sizes", "y", "dx", "dweights")
    for name, ours, theirs in zip(names, made, expected, strict=True):
        if name == "dweights":  # torch's own sum over a row has another order on a GPU
            torch.testing.assert_close(ours.cpu(), theirs)
        else:
            assert torch.equal(ours.cpu(), theirs), name
