"""StaticWeight: a weight's codes at fixed addresses, made again inside a graph unless nothing has changed."""

from __future__ import annotations

import torch
from torch import Tensor

import octavo_torch_native as native
from octavo import Recipe
from octavo_torch import arguments
from octavo_torch.delayed import DelayedState
from octavo_torch.graphs import wants_graph
from octavo_torch.layer import layer_for
from octavo_torch.operands import check_weight
from octavo_torch.weights import QuantizedWeight
from octavo_torch_cudagraph.plugin import NAME
from octavo_torch_native.plugin import NAME as NATIVE


class StaticWeight:
    """A weight [G, N, K] and its codes, for graphs that run more than once between two optimizer steps.

    quantized   takes the weight's place in `grouped_linear` and in `GroupedLinear.forward(weight=)`
    unchanged   int32 [1] on the weight's device: where it is not 0, `refresh` leaves the codes as they are. Set it from
                outside the graph: 0 before the first microbatch of a step, 1 before the others

    A `quantize_weight` outside of the graph would leave its codes as they were at the capture.
    """

    def __init__(
        self,
        weight: Tensor,
        recipe: Recipe,
        *,
        seed: int | Tensor | None = None,
        state: DelayedState | None = None,
    ) -> None:
        """seed, state: as in `quantize_weight`, for recipes that need one."""
        check_weight(weight)
        arguments.check_state(recipe, state, weight)
        self.weight, self._seed, self._state = weight, seed, state
        self.unchanged = torch.zeros(1, dtype=torch.int32, device=weight.device)
        need = weight.requires_grad
        layer = layer_for(recipe, weight, weight, weight.is_cpu, need, need, None, wants_graph(weight))
        plan = layer.plan.quantize_w if layer.quantize_w is not None else None
        if plan is not None and plan.backend not in (NATIVE, NAME):
            raise ValueError(
                f"weight is quantized by {plan.backend}, which has no flag for unchanged weights; let {NATIVE} or "
                f"{NAME} serve it, or quantize the weight at each call"
            )
        self._plan = plan
        self._made = None if plan is None else self._quantize(None)
        codes = None if self._made is None else self._made.codes
        self.quantized = QuantizedWeight(weight, codes, recipe, layer.w_layouts, weight._version)

    @torch.no_grad()
    def refresh(self) -> QuantizedWeight:
        """`quantized`, its codes made from the weight as it is now, or left where `unchanged` says so.

        Belongs into the captured function, before the layer's call. With delayed scaling the weight's amax is recorded.
        """
        if self._made is not None:
            self._quantize(self._made)
        self.quantized.version = self.weight._version
        return self.quantized

    def _quantize(self, out: native.Quantized | None) -> native.Quantized:
        assert self._plan is not None
        spec = self._plan.request.quantizer
        assert spec is not None  # part of the contract of "quantize"
        made = native.quantize(
            self.weight,
            spec,
            layouts=self._plan.request.layouts,
            seed=self._seed,
            operand="w",
            scale=None if self._state is None else self._state.encode_scale("w"),
            amax=self._state is not None,
            unchanged=None if out is None else self.unchanged,
            out=out,
        )
        if self._state is not None:
            assert made.amax is not None
            self._state.record("w", made.amax)
        return made
