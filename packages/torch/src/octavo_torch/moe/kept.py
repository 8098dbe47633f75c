"""What the forward of a MoE layer leaves for its backward."""

from __future__ import annotations

from typing import NamedTuple

from octavo_torch.autograd.saved import SavedByName
from octavo_torch.moe.forms import RowReader
from octavo_torch.scaling.seeds import DrawnSeed


class Kept(NamedTuple):
    """What a forward leaves for its backward beside the tensors that autograd saves.

    saved     where each operand is among these
    seeds     the seeds with which forward rounded, of fc1 and fc2; None for one that is a tensor, and so among them
    reader    reads h's codes; None unless h is kept as codes
    """

    saved: SavedByName
    seeds: list[DrawnSeed]
    reader: RowReader | None
