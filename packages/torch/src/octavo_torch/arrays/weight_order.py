"""The order in which the axes of a weight [G, N, K] lie in memory."""

from __future__ import annotations

from torch import Tensor

from octavo_registry.contract.cards import Weight


def order_of(w: Tensor) -> Weight:
    """ "kn" where `w` [G, N, K] is a view of contiguous matrices [G, K, N], else "nk"."""
    return "nk" if w.is_contiguous() or not w.mT.is_contiguous() else "kn"
