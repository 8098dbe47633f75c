"""LowRank: what one adapter adds to a grouped layer's result, as two grouped products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from octavo_torch.arrays.interleaving import to_halves
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.linear.call import Adapter
from octavo_torch.linear.functional import grouped_linear

_SIDE = 16
"""CUDA kernels multiply matrices whose sides are multiples of it."""


@dataclass(frozen=True, eq=False)
class LowRank(Adapter):
    """scale * (x A^T) B^T per group, in x's dtype: see GroupedLoRA.

    a        [G, r, K]
    b        [G, N, r]
    scale    a number
    dropped  the probability with which this call drops an element of x
    backend  a name or a closed list of names
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0
    dropped: float = 0.0
    backend: str | Sequence[str] | None = None

    def delta(self, x: Tensor, group_sizes: GroupSizes | None, interleave: int = 0) -> Tensor:
        """[M, N]; see octavo_torch.linear.call.Adapter."""
        a, b = self.a, to_halves(self.b, interleave) if interleave else self.b
        # zeros in both factors add zeros to sums
        missing = -a.shape[1] % _SIDE
        if missing:
            a, b = pad(a, (0, 0, 0, missing)), pad(b, (0, missing))
        if not torch.is_autocast_enabled(x.device.type):
            a, b = a.to(x.dtype), b.to(x.dtype)
        if self.dropped:
            x = dropout(x, self.dropped)
        low = grouped_linear(x, a, group_sizes, recipe=None, backend=self.backend)
        if self.scale != 1.0:
            low = low * self.scale
        return grouped_linear(low, b, group_sizes, recipe=None, backend=self.backend)


@dataclass(frozen=True, eq=False)
class Together(Adapter):
    """Several adapters of one weight; each adds its part."""

    parts: Sequence[Adapter]

    def delta(self, x: Tensor, group_sizes: GroupSizes | None, interleave: int = 0) -> Tensor:
        """[M, N], the sum; see octavo_torch.linear.call.Adapter."""
        first, *others = self.parts
        total = first.delta(x, group_sizes, interleave)
        for part in others:
            total = total + part.delta(x, group_sizes, interleave)
        return total
