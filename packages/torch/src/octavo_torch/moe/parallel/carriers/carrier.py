"""Journey: what a MoE layer asks of whatever carries its tokens to other ranks' experts, in one forward and backward.

One route implements it, `collective`. Another one, such as over peer memory, is a second implementation and a line in
`explain`; the layer, its forms, recipes and gradients do not change.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from octavo_torch.moe.moves import Moves
from octavo_torch.moe.permutation_autograd import Places


class Arrived(NamedTuple):
    """What this rank's experts work on: S tokens of all ranks, in the ranks' order.

    x        [S, K]
    weights  fp32 [S, k]
    choices  int64 [S, k], numbers of this rank's experts; -1 for choices of other ranks, and in places without a token
    """

    x: Tensor
    weights: Tensor
    choices: Tensor


class Journey(Protocol):
    """Every rank calls the same methods in the same order, once each: collectives meet there.

    rows   that this rank's experts have at most; buffers hold one more, which is nobody's
    """

    rows: int

    def away(self, x: Tensor, weights: Tensor, choices: Tensor, /) -> Arrived:
        """Tokens [T, K], weights [T, k] and choices [T, k] among all experts, to where their experts are."""

    def bound(self, sizes: Tensor, places: Places, /) -> tuple[Tensor, Places]:
        """Sizes and places of the arrived choices, in `rows` rows."""

    def home(self, moves: Moves, rows: Tensor, places: Places, /) -> Tensor:
        """The experts' rows [M, N], back and summed: [T, N]."""

    def away_gradient(self, dy: Tensor, /) -> Tensor:
        """dy [T, N] to where its tokens are: [S, N]."""

    def home_weights(self, dweights: Tensor, /) -> Tensor:
        """The gradient of the arrived choices' weights, fp32 [S, k], back: [T, k]."""
