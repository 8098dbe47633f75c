"""The functions of a layer, made of its plans: for w [G, N, K] as the caller has it, however it lies in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from octavo_registry.contract.cards import Weight
from octavo_registry.contract.gemm import Dgrad, Fprop, InterleaveHalves, Wgrad
from octavo_registry.contract.quantize import AnyBoundQuantize, Quantize, QuantizeInto, QuantizeWithAmax
from octavo_registry.dispatch.layer_plan import GemmPlan, QuantizePlan, WgradPlan
from octavo_torch.arrays.grouped_tensor import GroupedTensor, Rows
from octavo_torch.dispatch.interleaved_weight import Interleaving, interleaved_quantizer, interleaved_wgrad
from octavo_torch.dispatch.room import within
from octavo_torch.dispatch.transposed_weight import (
    quantizing_transposed,
    reading_transposed,
    writing_transposed,
)

FpropFunction = Fprop[Tensor, Rows]
DgradFunction = Dgrad[Tensor, Rows]
WgradFunction = Wgrad[Tensor, Rows]
QuantizeFunction = Quantize[Tensor, GroupedTensor]

Function = TypeVar("Function", bound=Callable[..., object])


class QuantizerFunctions(NamedTuple):
    """The functions of one operand's quantizer; None for those that it does not have."""

    run: QuantizeFunction
    with_amax: QuantizeWithAmax[Tensor, GroupedTensor] | None
    into: QuantizeInto[Tensor, GroupedTensor] | None

    @classmethod
    def of(cls, bound: AnyBoundQuantize) -> QuantizerFunctions:
        """A backend's own."""
        return cls(bound.run, bound.with_amax, bound.into)


@dataclass(frozen=True, slots=True)
class LayerFunctions:
    """Makes a layer's functions of its plans. A backend's own function is used where it fits, else one is composed.

    order              of w's axes in the plans: where that is "kn", w is handed over transposed
    block              rows that stay together in a w whose gate and up rows are interleaved; 0: they are not
    interleave_halves  the backend's function that takes such a w apart and puts it together; None: torch's operations
                       do
    device             of the GEMMs
    left_free          multiprocessors of it that the GEMMs do not use
    """

    order: Weight
    block: int
    interleave_halves: InterleaveHalves[Tensor] | None
    device: torch.device
    left_free: int

    def reading(self, plan: GemmPlan) -> Callable[..., Tensor]:
        """fprop or dgrad, which reads w."""
        run = self._limited(plan)
        run = reading_transposed(run) if self.order == "kn" else run
        return self._interleaving.reading(run) if self.block else run

    def writing(self, plan: WgradPlan) -> Callable[..., Tensor]:
        """wgrad, which writes dw."""
        interleaved = interleaved_wgrad(plan, self.block, self.left_free)
        run = self._limited(plan if interleaved is None else interleaved)
        run = writing_transposed(run) if self.order == "kn" else run
        return self._interleaving.writing(run) if self.block and interleaved is None else run

    def quantizing(self, plan: QuantizePlan) -> QuantizerFunctions:
        """The functions of w's quantizer."""
        of_halves, own = plan.bound, interleaved_quantizer(plan, self.block, self.order)
        run, with_amax, into = (None, None, None) if own is None else (own.run, own.with_amax, own.into)
        quantize = self._quantizing(of_halves.run, run)
        assert quantize is not None  # every quantizer has it
        return QuantizerFunctions(
            quantize, self._quantizing(of_halves.with_amax, with_amax), self._quantizing(of_halves.into, into)
        )

    def _quantizing(self, of_halves: Function | None, interleaved: Function | None) -> Function | None:
        """`interleaved`, which reads an interleaved w as it lies; where it is None, `of_halves` behind a copy."""
        run = of_halves if interleaved is None else interleaved
        if run is None:
            return None
        run = quantizing_transposed(run) if self.order == "kn" else run
        return self._interleaving.quantizing(run) if self.block and interleaved is None else run

    def halves(self, w: Tensor) -> Tensor:
        """`w` with the gate half first: as its codes have it."""
        return self._interleaving.to_halves(w) if self.block else w

    @property
    def _interleaving(self) -> Interleaving:
        return Interleaving(self.block, self.interleave_halves)

    def _limited(self, plan: GemmPlan) -> Callable[..., Tensor]:
        return within(plan, self.device, self.left_free) if self.left_free else plan.run
