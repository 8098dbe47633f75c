"""Codes and scales as the bytes that tests compare."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo_torch import CodedWeight, QuantizedWeight


def planes(weight: Tensor | QuantizedWeight) -> list[Tensor]:
    """The planes of a weight that is codes, or of a quantized one, and the amax that came with it."""
    if isinstance(weight, QuantizedWeight):
        parts: tuple[object, ...] = (weight.codes, weight.amax)
    else:
        assert isinstance(weight, CodedWeight)
        parts = (weight.codes,)
    return [leaf.view(torch.uint8) for leaf in pytree.tree_leaves(parts) if leaf is not None]
