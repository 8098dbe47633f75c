"""How many choices each expert got."""

from __future__ import annotations

import torch
from torch import Tensor


def counts_by_expert(choices: Tensor, experts: int) -> Tensor:
    """int64 [E]; a choice that is no expert's counts nowhere. Sums of integers, whose order changes nothing."""
    flat = choices.reshape(-1).long()
    there = (flat >= 0) & (flat < experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=choices.device)
    return counts.scatter_add(0, torch.where(there, flat, experts), torch.ones_like(flat))[:experts]
