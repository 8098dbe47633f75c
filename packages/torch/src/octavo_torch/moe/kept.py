"""What the forward of a MoE layer leaves for its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from octavo_torch.autograd.saved import SavedByName
from octavo_torch.moe.forms import RowReader
from octavo_torch.scaling.seeds import DrawnSeed


class Kept(NamedTuple):
    """What a forward leaves for its backward.

    tensors   for autograd to save
    saved     where each operand is among them, by name
    seeds     the seeds with which forward rounded, of fc1 and fc2; None for one that is a tensor, which is kept by name
    reader    reads h's codes; None unless h is kept as codes
    """

    tensors: Sequence[Tensor | None]
    saved: SavedByName
    seeds: list[DrawnSeed]
    reader: RowReader | None
