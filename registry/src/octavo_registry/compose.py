"""A grouped linear layer from the operations that backends serve: GEMMs, and the quantizers that feed them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from octavo import QuantizerSpec, Recipe
from octavo.formats import DType
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS, READERS, Gemm
from octavo_registry.candidates import Candidates
from octavo_registry.report import describe_layer, describe_request
from octavo_registry.request import Bound, Plan, Request


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Everything that a grouped linear layer runs. Printable.

    recipe        the whole recipe
    fprop         y from x and w
    dgrad, wgrad  dx from dy and w, dw from x and dy; None where the request was not for training
    quantize_*    one plan an operand, asking for exactly the planes that the GEMMs above read, each in the layout
                  that its GEMM wants: the spec is `plan.request.quantizer`, the layouts are `plan.request.layouts`;
                  None where no GEMM reads the operand quantized
    """

    recipe: Recipe
    fprop: Plan
    dgrad: Plan | None
    wgrad: Plan | None
    quantize_x: Plan | None
    quantize_w: Plan | None
    quantize_dy: Plan | None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that there are: quantizers, then GEMMs."""
        every = (self.quantize_x, self.quantize_w, self.quantize_dy, self.fprop, self.dgrad, self.wgrad)
        return tuple(plan for plan in every if plan is not None)

    def __str__(self) -> str:
        return describe_layer(self)


def gemm_request(layer: Request, recipe: Recipe, gemm: Gemm, wgrad_dtype: DType | None) -> Request:
    """The request of one GEMM of a layer, from the layer's fprop request with the whole recipe.

    y has the request's out_dtype, and so has dy; dx has the recipe's output_dtype, else dy's dtype; dw has
    `wgrad_dtype`, else the recipe's, else x's dtype.
    """
    in_dtype, out_dtype, other = layer.in_dtype, layer.out_dtype, layer.in_dtype
    if gemm == "dgrad":
        in_dtype, out_dtype = layer.out_dtype, recipe.output_dtype or layer.out_dtype
    elif gemm == "wgrad":
        out_dtype, other = wgrad_dtype or recipe.wgrad_dtype or layer.in_dtype, layer.out_dtype
    return replace(
        layer,
        op=gemm,
        recipe=recipe.for_gemm(gemm),
        quantizer=None,
        in_dtype=in_dtype,
        out_dtype=out_dtype,
        other_dtype=None if recipe.quantizes(gemm) or other == in_dtype else other,
    )


def operand_spec(recipe: Recipe, operand: Operand, training: bool) -> QuantizerSpec | None:
    """How `operand` is quantized, in the planes that the layer's GEMMs read; None: not at all."""
    spec = recipe.quantizer(operand)
    if training or spec is None:
        return spec
    if operand == "dy" or not recipe.quantizes("fprop"):
        return None
    return QuantizerSpec(**{**dict(spec), "orientation": "rowwise"})


def quantize_request(layer: Request, spec: QuantizerSpec, operand: Operand, layouts: tuple[str, str]) -> Request:
    """The request of one operand's quantizer."""
    in_dtype = layer.out_dtype if operand == "dy" else layer.in_dtype
    return replace(
        layer,
        op="quantize",
        recipe=None,
        quantizer=spec,
        in_dtype=in_dtype,
        out_dtype=in_dtype,
        k=layer.n if operand == "dy" else layer.k,
        n=layer.n if operand == "w" else None,
        stacked=operand == "w",
        layouts=layouts,
    )


@dataclass(slots=True)
class Composition:
    """Which candidate serves each operation, by index, and why better ones were passed over."""

    gemms: dict[Gemm, tuple[Candidates, int]]
    quantizers: dict[Operand, Candidates]
    passed_over: dict[Gemm, dict[int, str]] = field(default_factory=dict)


Find = Callable[[Request], Candidates]


def _bound(candidates: Candidates, index: int) -> Bound | None:
    found = candidates.at(index)
    return found[1] if found is not None else None


def compose(layer: Request, recipe: Recipe, wgrad_dtype: DType | None, find: Find) -> Composition | Candidates:
    """The best combination of backends, or the candidates of the operation that nothing serves.

    GEMMs take their best candidates unless nothing quantizes an operand to the layouts that these want; then
    combinations are tried by the sum of their places in the order, those that keep the fprop before others.
    """
    gemms: tuple[Gemm, ...] = GEMMS if layer.training else ("fprop",)
    candidates = {gemm: find(gemm_request(layer, recipe, gemm, wgrad_dtype)) for gemm in gemms}
    for found in candidates.values():
        if found.at(0) is None:
            return found
    start = tuple(0 for _ in gemms)
    queue, seen = [(0, start)], {start}
    first_failure: Candidates | None = None
    passed_over: dict[Gemm, dict[int, str]] = {gemm: {} for gemm in gemms}
    while queue:
        _, places = heapq.heappop(queue)
        chosen = dict(zip(gemms, places, strict=True))
        layouts: dict[Gemm, Mapping[str, str]] = {}
        for gemm in gemms:
            bound = _bound(candidates[gemm], chosen[gemm])
            if bound is None:
                break
            layouts[gemm] = bound.layouts
        else:
            quantizers, failed = _quantizers(layer, recipe, layouts, find)
            if failed is None:
                kept = {g: {i: why for i, why in passed_over[g].items() if i < chosen[g]} for g in gemms}
                return Composition({g: (candidates[g], chosen[g]) for g in gemms}, quantizers, kept)
            operand, nobody = failed
            first_failure = first_failure or nobody
            for gemm in READERS[operand]:
                if gemm not in chosen or not recipe.quantizes(gemm):
                    continue
                wanted = layouts[gemm].get(operand, PLAIN)
                passed_over[gemm].setdefault(
                    chosen[gemm], f"wants {operand} in layout {wanted!r}, and nothing serves {_asked(nobody.request)}"
                )
                further = tuple(place + (g == gemm) for g, place in chosen.items())
                if further not in seen:
                    seen.add(further)
                    heapq.heappush(queue, (sum(further), further))
    assert first_failure is not None
    return first_failure


def _asked(request: Request) -> str:
    row, column = request.layouts
    return f"{describe_request(request)}, in layouts {row!r} and {column!r}"


def _quantizers(
    layer: Request, recipe: Recipe, layouts: Mapping[Gemm, Mapping[str, str]], find: Find
) -> tuple[dict[Operand, Candidates], tuple[Operand, Candidates] | None]:
    """Candidates for each operand, and the first operand for which there are none."""
    found: dict[Operand, Candidates] = {}
    for operand, readers in READERS.items():
        spec = operand_spec(recipe, operand, layer.training)
        if spec is None:
            continue
        row, column = (
            layouts[gemm].get(operand, PLAIN) if gemm in layouts and recipe.quantizes(gemm) else PLAIN
            for gemm in readers
        )
        found[operand] = find(quantize_request(layer, spec, operand, (row, column)))
        if found[operand].at(0) is None:
            return found, (operand, found[operand])
    return found, None
