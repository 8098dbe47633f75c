"""LowRank: what an adapter adds to a grouped layer's result, as two grouped products; SumOfAdapters adds several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import dropout, pad

from octavo_torch.arrays.interleaving import to_halves
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.compiler.autocast import autocast_on
from octavo_torch.dispatch.device import CUDA_MULTIPLE
from octavo_torch.linear.call import Adapter
from octavo_torch.linear.functional import grouped_linear


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
        missing = -a.shape[1] % CUDA_MULTIPLE
        if missing:
            a, b = pad(a, (0, 0, 0, missing)), pad(b, (0, missing))
        if not autocast_on(x.device.type):
            a, b = a.to(x.dtype), b.to(x.dtype)
        if self.dropped:
            x = dropout(x, self.dropped)
        low = grouped_linear(x, a, group_sizes, recipe=None, backend=self.backend)
        if self.scale != 1.0:
            low = low * self.scale
        return grouped_linear(low, b, group_sizes, recipe=None, backend=self.backend)


@dataclass(frozen=True, eq=False)
class SumOfAdapters(Adapter):
    """Several adapters of one weight, whose deltas are added."""

    parts: Sequence[Adapter]

    def delta(self, x: Tensor, group_sizes: GroupSizes | None, interleave: int = 0) -> Tensor:
        """The sum of the parts' deltas, [M, N]; see octavo_torch.linear.call.Adapter."""
        first, *others = self.parts
        total = first.delta(x, group_sizes, interleave)
        for part in others:
            total = total + part.delta(x, group_sizes, interleave)
        return total
