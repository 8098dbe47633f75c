"""LayerPlan: everything that a grouped linear layer runs, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from octavo import Recipe
from octavo.quantizer import Operand
from octavo.recipe_base import Gemm
from octavo_registry.contract.backend import AnyBoundGemm
from octavo_registry.contract.cards import Weight
from octavo_registry.contract.gemm import AnyBoundDgrad, AnyBoundFprop, AnyBoundWgrad
from octavo_registry.contract.plan import Plan, table
from octavo_registry.contract.quantize import AnyBoundQuantize
from octavo_registry.contract.request import GemmRequest, QuantizeRequest, sm
from octavo_registry.contract.weights import WEIGHT_SHAPES

QuantizePlan: TypeAlias = Plan[QuantizeRequest, AnyBoundQuantize]
GemmPlan: TypeAlias = Plan[GemmRequest, AnyBoundGemm]
FpropPlan: TypeAlias = Plan[GemmRequest, AnyBoundFprop]
DgradPlan: TypeAlias = Plan[GemmRequest, AnyBoundDgrad]
WgradPlan: TypeAlias = Plan[GemmRequest, AnyBoundWgrad]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Everything that a grouped linear layer runs. Printable.

    recipe        the whole recipe
    fprop         y from x and w
    dgrad, wgrad  dx from dy and w, dw from x and dy; None where the request was not for training
    quantize_*    one plan per operand, asking for exactly the planes that the GEMMs above read, each in the layout
                  that its GEMM needs: the spec is `plan.request.quantizer`, the layouts are `plan.request.layouts`;
                  None where no GEMM reads the operand quantized
    weight        how the caller's w lies in memory; `transposes` where the plans take it the other way
    """

    recipe: Recipe
    fprop: FpropPlan
    dgrad: DgradPlan | None
    wgrad: WgradPlan | None
    quantize_x: QuantizePlan | None
    quantize_w: QuantizePlan | None
    quantize_dy: QuantizePlan | None
    weight: Weight = "nk"

    @property
    def transposes(self) -> bool:
        """True where the front end hands w over with its last two axes swapped, and swaps dw back."""
        return self.fprop.request.weight != self.weight

    @property
    def batch_invariant(self) -> bool:
        """True where recipe and backend promise that a row of y has the same bits in every batch."""
        return self.recipe.batch_invariant and self.fprop.capability.batch_invariant

    @property
    def quantizers(self) -> tuple[tuple[str, QuantizePlan | None], ...]:
        """The quantizers by name."""
        return (("quantize_x", self.quantize_x), ("quantize_w", self.quantize_w), ("quantize_dy", self.quantize_dy))

    @property
    def gemms(self) -> tuple[tuple[str, GemmPlan | None], ...]:
        """The GEMMs by name."""
        return (("fprop", self.fprop), ("dgrad", self.dgrad), ("wgrad", self.wgrad))

    def reads_tokens(self, gemm: Gemm, operand: Operand) -> bool:
        """True where this GEMM takes `TokenRows` for the operand, which it reads in high precision."""
        return not self.recipe.quantizes(gemm) and self._takes_tokens(gemm, operand)

    def reads_codes_of_tokens(self, gemm: Gemm, operand: Operand) -> bool:
        """True where this GEMM takes `TokenRows` of codes for the operand, because a row's codes are its token's."""
        quantizer = dict(self.quantizers)[f"quantize_{operand}"] if self.recipe.quantizes(gemm) else None
        if quantizer is None or not quantizer.request.quantizer.independent_rows:
            return False
        return self._takes_tokens(gemm, operand)

    def _takes_tokens(self, gemm: Gemm, operand: Operand) -> bool:
        plan = dict(self.gemms)[gemm]
        return plan is not None and operand in plan.bound.takes_tokens

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that there are: quantizers, then GEMMs."""
        return tuple(plan for _, plan in (*self.quantizers, *self.gemms) if plan is not None)

    def __str__(self) -> str:
        first = self.fprop.request
        where = f"{first.framework} on {first.device}" + (f" ({sm(first.arch)})" if first.arch else "")
        name = f"{self.recipe.kind} ({self.recipe.fingerprint}){computed_words(self.recipe)}"
        title = f"grouped linear in {name} for {where}{weight_words(self)}"
        return "\n".join([title, table(layer_rows(self)), f"  {batch_words(self)}"])


def batch_words(layer: LayerPlan) -> str:
    """A sentence on whether a row of y has the same bits in every batch, and if not, why."""
    if layer.batch_invariant:
        return "A row of y has the same bits in every batch."
    if not layer.recipe.batch_invariant:
        return f"A row of y depends on its batch: {layer.recipe.kind} takes a scale from all rows of a group."
    return f"A row of y may depend on its batch: {layer.fprop.backend} promises no order of sums."


def computed_words(recipe: Recipe) -> str:
    """A clause on the recipe that GEMMs compute `recipe` as, if that is another one."""
    return "" if recipe.computed_as is recipe else f", computed as {recipe.computed_as.kind}"


def weight_words(layer: LayerPlan) -> str:
    """A clause on how w is read, unless it lies in memory as [G, N, K] and is read so."""
    lies, taken = WEIGHT_SHAPES[layer.weight], WEIGHT_SHAPES[layer.fprop.request.weight]
    if layer.transposes:
        return f", w {lies} transposed to {taken} and dw back"
    return "" if layer.weight == "nk" else f", w read as {lies}"


def layer_rows(layer: LayerPlan) -> list[tuple[str, str, str, str]]:
    """Operation, backend, recipe kind, and layouts or note, for each operation that the layer runs."""
    rows = []
    for name, quantizer in layer.quantizers:
        if quantizer is not None:
            request = quantizer.request
            planes = zip(("rowwise", "columnwise"), request.layouts, strict=True)
            detail = ", ".join(f"{plane} {layout}" for plane, layout in planes if plane in request.quantizer.directions)
            rows.append((name.replace("_", " "), quantizer.backend, request.kind, _with_note(detail, quantizer.note)))
    for name, gemm in layer.gemms:
        if gemm is not None:
            taken = ", ".join(f"{operand} {layout}" for operand, layout in sorted(gemm.layouts.items()))
            rows.append((name, gemm.backend, gemm.request.kind, _with_note(taken, gemm.note)))
    return rows


def _with_note(detail: str, note: str) -> str:
    return "; ".join(part for part in (detail, note) if part)
