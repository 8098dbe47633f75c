"""What a forward leaves for its backward, and passes of a MoE layer that are written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo_torch.autograd.saved import Saved
from octavo_torch.memo import Bounded
from octavo_torch.mlp.forward import DrawnSeed
from octavo_torch.mlp.gradients import Needs
from octavo_torch.moe.forms import RowReader
from octavo_torch.recording.recorded_pass import RecordedPass


class Kept(NamedTuple):
    """What a forward leaves for its backward.

    tensors   for autograd to save
    places    where each of them is, by name
    seeds     the seeds with which forward rounded, of fc1 and fc2; None for one that is a tensor, which is kept by name
    reader    reads h's codes; None unless h is kept as codes
    """

    tensors: Sequence[Tensor | None]
    places: dict[str, Saved]
    seeds: list[DrawnSeed]
    reader: RowReader | None


class RecordedMoe:
    """The passes of calls of one kind, in which everything that decides about their launches is the same.

    composed   whether such calls cannot be written down
    forward    None until one is
    kept       what that forward leaves, without its tensors
    backward   by the gradients that are needed and dy's dtype; None for one that cannot be written down
    """

    __slots__ = ("backward", "composed", "forward", "kept")

    forward: RecordedPass | None
    kept: Kept

    def __init__(self) -> None:
        self.composed = False
        self.forward = None
        self.backward: Bounded[tuple[Needs, torch.dtype], RecordedPass | None] = Bounded()
