"""StaticWeight: a weight's codes at fixed addresses, made again inside a graph unless nothing has changed."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import Recipe
from octavo_torch.plugin_api import DelayedState, QuantizedWeight, leaves_of, quantize_weight


class StaticWeight:
    """A weight and its codes, for graphs that run more than once between two optimizer steps.

    quantized   takes the weight's place in `grouped_linear` and in `GroupedLinear.forward(weight=)`
    unchanged   int32 [1] on the weight's device: where it is not 0, `refresh` leaves the codes as they are. Set it from
                outside the graph: 0 before the first microbatch of a step, 1 before the others

    A `quantize_weight` outside of the graph would leave its codes as they were at the capture.
    """

    def __init__(
        self,
        weight: Tensor | tuple[Tensor, ...],
        recipe: Recipe,
        *,
        seed: int | Tensor | None = None,
        state: DelayedState | None = None,
        interleave: int | None = None,
    ) -> None:
        """weight: [G, N, K], or one tensor [N, K] a group. Others as in `quantize_weight`."""
        self.weight, self._recipe, self._interleave = weight, recipe, interleave
        self._seed, self._state = seed, state
        self.quantized: QuantizedWeight = self._quantize(None)
        self.unchanged = torch.zeros(1, dtype=torch.int32, device=leaves_of(weight)[0].device)

    def refresh(self) -> QuantizedWeight:
        """`quantized`, its codes made from the weight as it is now, or left where `unchanged` says so.

        Belongs into the captured function, before the layer's call. With delayed scaling the weight's amax is recorded.
        """
        return self._quantize(self.quantized)

    def _quantize(self, out: QuantizedWeight | None) -> QuantizedWeight:
        return quantize_weight(
            self.weight,
            self._recipe,
            seed=self._seed,
            state=self._state,
            interleave=self._interleave,
            out=out,
            unchanged=None if out is None else self.unchanged,
        )
