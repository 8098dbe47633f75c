"""Chooses a backend for each operation of a grouped linear layer: its GEMMs, and the quantizers that feed them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from octavo import Recipe
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS, Gemm
from octavo_registry.contract.bound import Bound
from octavo_registry.contract.request import GemmRequest, Request, describe_request
from octavo_registry.contract.weights import as_it_lies, readers
from octavo_registry.dispatch.candidates import Candidates
from octavo_registry.dispatch.layer_requests import (
    OWN_DTYPES,
    LayerDtypes,
    gemm_request,
    operand_spec,
    quantize_request,
)


@dataclass(slots=True)
class Composition:
    """Which candidate serves each operation, by index, and why better ones were passed over."""

    gemms: dict[Gemm, tuple[Candidates, int]]
    quantizers: dict[Operand, Candidates]
    passed_over: dict[Gemm, dict[int, str]] = field(default_factory=dict)

    @property
    def backends(self) -> tuple[str, ...]:
        """Names by operation: GEMMs, then quantizers."""
        serving = [candidates.at(index) for candidates, index in self.gemms.values()]
        serving += [candidates.at(0) for candidates in self.quantizers.values()]
        return tuple(pair[0].name for pair in serving if pair is not None)


Find = Callable[[Request], Candidates]
OPERANDS: tuple[Operand, ...] = ("x", "w", "dy")


def _bound(candidates: Candidates, index: int) -> Bound | None:
    serving = candidates.at(index)
    return serving[1] if serving is not None else None


def compose(
    layer: GemmRequest, recipe: Recipe, find: Find, dtypes: LayerDtypes = OWN_DTYPES
) -> Composition | Candidates:
    """The best combination of backends, or the candidates of an operation that nothing serves.

    find   the candidates for one request

    A weight that lies as [G, K, N] is read in place if that leaves every operation with the backend that it has for a
    transposed copy. Else the plans are for the copy, which the front end makes. So the order of w in memory never
    changes which backend runs an operation.
    """
    of_copy = _compose(replace(layer, weight="nk"), recipe, find, dtypes)
    if layer.weight == "nk" or isinstance(of_copy, Candidates):
        return of_copy
    in_place = _compose(layer, recipe, find, dtypes)
    return in_place if isinstance(in_place, Composition) and in_place.backends == of_copy.backends else of_copy


def _compose(layer: GemmRequest, recipe: Recipe, find: Find, dtypes: LayerDtypes) -> Composition | Candidates:
    """The best combination of backends, or the candidates of the operation that nothing serves.

    Each GEMM gets its best candidate if the layouts that these candidates read are layouts which some backend quantizes
    to. Else further combinations are tried, in the order of the sum of their candidates' ranks; among equal sums, the
    one with the better candidate for fprop comes first.
    """
    gemms: tuple[Gemm, ...] = GEMMS if layer.training else ("fprop",)
    candidates = {gemm: find(gemm_request(layer, recipe, gemm, dtypes)) for gemm in gemms}
    for of_gemm in candidates.values():
        if of_gemm.at(0) is None:
            return of_gemm
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
            quantizers, failed = _quantizers(layer, recipe, layouts, find, dtypes)
            if failed is None:
                better = {g: {i: why for i, why in passed_over[g].items() if i < chosen[g]} for g in gemms}
                return Composition({g: (candidates[g], chosen[g]) for g in gemms}, quantizers, better)
            operand, nobody = failed
            first_failure = first_failure or nobody
            for gemm in readers(operand, layer.weight):
                if gemm not in chosen or not recipe.quantizes(gemm):
                    continue
                layout = layouts[gemm].get(operand, PLAIN)
                passed_over[gemm].setdefault(
                    chosen[gemm], f"needs {operand} in layout {layout!r}, and nothing serves {_asked(nobody.request)}"
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
    layer: GemmRequest, recipe: Recipe, layouts: Mapping[Gemm, Mapping[str, str]], find: Find, dtypes: LayerDtypes
) -> tuple[dict[Operand, Candidates], tuple[Operand, Candidates] | None]:
    """Candidates for each operand, and the first operand for which there are none."""
    quantizers: dict[Operand, Candidates] = {}
    for operand in OPERANDS:
        spec = operand_spec(recipe, operand, layer.training)
        if spec is None:
            continue
        row, column = (
            layouts[gemm].get(operand, PLAIN) if gemm in layouts and recipe.quantizes(gemm) else PLAIN
            for gemm in readers(operand, layer.weight)
        )
        spec = as_it_lies(spec, operand, layer.weight)
        quantizers[operand] = find(quantize_request(layer, spec, operand, (row, column), dtypes))
        if quantizers[operand].at(0) is None:
            return quantizers, (operand, quantizers[operand])
    return quantizers, None
