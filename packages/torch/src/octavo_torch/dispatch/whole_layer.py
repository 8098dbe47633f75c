"""WholeLayer: what a backend that serves all of a layer may make of its passes."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from octavo_torch.arrays.sizes import Sizes
from octavo_torch.scaling.delayed_state import DelayedState


class WholeLayer(Protocol):
    """What `Bound.whole_layer` makes: a layer's two passes, bit for bit those of its plans one after the other.

    For calls on plain tensors that give nothing but x, a weight, sizes, a bias, a seed and a state; others are
    composed of the plans.

    keeps_x, keeps_w   whether backward reads the unquantized operand
    """

    keeps_x: bool
    keeps_w: bool

    def takes(self, x: Tensor, w: Tensor, bias: Tensor | None, state: DelayedState | None) -> bool:
        """Whether the arrays stand in memory as the passes read them; a call that does not is composed."""

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        sizes: Sizes,
        bias: Tensor | None,
        seed: Tensor | int | None,
        state: DelayedState | None,
        record: bool,
        group_offset: int,
    ) -> tuple[Tensor, Tensor | None, Any]:
        """y, the codes that backward reads, and what else it is given, which is the call's own and stays as it is.

        sizes   int [G], checked where they are in host memory; they may change before backward
        record  x's and w's amax goes into the state
        """

    def backward(
        self,
        dy: Tensor,
        x: Tensor | None,
        w: Tensor | None,
        kept: Tensor | None,
        rest: Any,
        wanted: tuple[bool, bool],
        seed: Tensor | int | None,
        state: DelayedState | None,
        record: bool,
        group_offset: int,
    ) -> tuple[Tensor | None, Tensor | None]:
        """dx and dw, each where it is wanted, of dy in y's dtype; x and w where they are kept."""

    def sizes(self, rest: Any) -> Tensor:
        """The call's sizes, int64 [G], cut to the rows."""
