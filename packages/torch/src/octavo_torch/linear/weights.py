"""QuantizedWeight: weights quantized once and used by many microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo import Recipe
from octavo_registry.contract import WEIGHT_SHAPES
from octavo_registry.contract import Weight as WeightOrder
from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.dtypes import name_of
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.per_group import Weights, are_same, leaves_of
from octavo_torch.arrays.versioned import Versioned

Layouts = tuple[str | None, str | None]
"""Layouts of the rowwise and of the columnwise plane; None for a plane that is absent, or that no GEMM reads."""


@dataclass(eq=False)
class QuantizedWeight(Versioned):
    """Weights [G, N, K] and their codes; takes the weight's place in `grouped_linear`. Made by `quantize_weight`.

    weight    the high-precision weights, which receive the gradient: one tensor [G, N, K], or one [N, K] per group
    codes     both directions if a gradient may be needed; None if no GEMM of the recipe reads quantized weights
    recipe    the recipe of the codes
    layouts   of the planes of the codes; None without codes
    version   the weight's in-place version when it was quantized: if it has changed since, the codes are refused. None
              if it is not known, because a compiled graph or torch.inference_mode has made the codes or the weight
    amax      fp32 [G] of delayed scaling: max |w| when it was quantized; None for other recipes
    interleave  b: b gate rows and b up rows alternate in the weight, as grouped_mlp has it; 0: they do not
    order     the order of axes in which the weight was quantized: "nk" for [G, N, K], "kn" for a view of [G, K, N]
    values_dtype  dtype of the values that were quantized: the weight's, or autocast's; None if there were no values
    """

    weight: Weights
    codes: GroupedTensor | None
    recipe: Recipe
    layouts: Layouts | None
    version: int | None
    amax: Tensor | None = None
    interleave: int = 0
    order: WeightOrder = "nk"
    values_dtype: torch.dtype | None = None

    @property
    def made_of(self) -> Weights:
        """The weights, whose version counts."""
        return self.weight

    def check(self, recipe: Recipe, layouts: Layouts | None, order: WeightOrder) -> None:
        """ValueError where the codes do not fit the call, or are older than the weight."""
        self.check_made_for(recipe, layouts, order)
        if self.outdated:
            raise ValueError("weight has changed in place since quantize_weight; quantize it again")

    def check_values(self, name: str, dtype: torch.dtype) -> None:
        """ValueError if the codes are of values in another dtype than the call reads. `name`: the weight's."""
        if self.codes is None or self.values_dtype in (None, dtype):
            return
        own = leaves_of(self.weight)[0].dtype
        if self.values_dtype is torch.float32 and own is not torch.float32:  # which autocast would not have made
            raise ValueError(
                f"{name} was quantized from values in float32 and has been cast to {name_of(own)} since, whose codes "
                "are others; quantize it again"
            )
        if self.values_dtype is own:
            where, advice = "outside of", "quantize it inside of autocast, too, with the dtype of the call's"
        else:
            where, advice = "inside of", "quantize it outside, or make the call inside of the same autocast"
        raise ValueError(
            f"{name} was quantized {where} torch.autocast, from values in {name_of(self.values_dtype)}, and the call "
            f"reads them in {name_of(dtype)}, whose codes are others; {advice}"
        )

    def check_made_for(self, recipe: Recipe, layouts: Layouts | None, order: WeightOrder) -> None:
        """ValueError where the codes do not fit the recipe or the backend."""
        if recipe is not self.recipe and recipe.fingerprint != self.recipe.fingerprint:
            raise ValueError(
                f"weight was quantized for recipe {self.recipe.kind} ({self.recipe.fingerprint}) and the call's is "
                f"{recipe.kind} ({recipe.fingerprint}); quantize it for this one"
            )
        own = self.layouts or (None, None)
        if layouts is not None and any(a is not None and b is None for a, b in zip(layouts, own, strict=True)):
            raise ValueError(
                "weight required no gradient when it was quantized, so it has codes for results alone, and the call is "
                "differentiated; quantize it while it requires a gradient, or give the weight itself"
            )
        if layouts is not None and any(a is not None and a != b for a, b in zip(layouts, own, strict=True)):
            raise ValueError(
                f"weight was quantized to layouts {self.layouts} and the chosen backend wants {layouts}; "
                "give quantize_weight and grouped_linear the same backend"
            )
        if layouts is not None and order != self.order:
            raise ValueError(
                f"weight was quantized as {WEIGHT_SHAPES[self.order]} and the call reads it as {WEIGHT_SHAPES[order]}; "
                "give both the same backend, and quantize a weight again that lies in memory in another way now"
            )


@dataclass(eq=False)
class WeightCodes:
    """What quantizing a weight returns; the fields are those of a QuantizedWeight."""

    codes: GroupedTensor | None = None
    amax: Tensor | None = None
    order: WeightOrder = "nk"
    values_dtype: torch.dtype | None = None


def layouts_of(codes: GroupedTensor) -> Layouts:
    """The layouts of the planes that `codes` has."""
    directions = codes.spec.quantizer.directions
    row, column = codes.spec.rowwise_layout, codes.spec.columnwise_layout
    return row if "rowwise" in directions else None, column if "columnwise" in directions else None


def check_own(name: str, quantized: object, own: Weights | None) -> None:
    """ValueError unless `quantized` comes from exactly the tensors of `own`."""
    if not isinstance(quantized, QuantizedWeight):
        raise ValueError(f"{name} is {brief(quantized)}; give what this module's quantize_{name} returned")
    if not are_same(own, quantized.weight):
        what, function = ("were", "quantize_weights") if name == "weights" else ("was", "quantize_weight")
        raise ValueError(f"{name} {what} not made by this module; give what its {function} returned")


_OPTIONAL = "codes", "amax"
_Context = tuple[Recipe, Layouts | None, int | None, int, WeightOrder, torch.dtype | None, tuple[str, ...]]


def _present(value: QuantizedWeight | WeightCodes) -> tuple[str, ...]:
    # what is not there is no leaf: torch.compile takes no None
    return tuple(name for name in _OPTIONAL if getattr(value, name) is not None)


def _flatten(value: QuantizedWeight) -> tuple[list[object], _Context]:
    present = _present(value)
    leaves = [value.weight, *(getattr(value, name) for name in present)]
    version = value.version_for_graphs()
    facts = value.recipe, value.layouts, version, value.interleave, value.order, value.values_dtype
    return leaves, (*facts, present)


def _unflatten(leaves: Iterable[Any], context: _Context) -> QuantizedWeight:
    weight, *rest = leaves
    recipe, layouts, version, interleave, order, values_dtype, present = context
    codes, amax = map(dict(zip(present, rest, strict=True)).get, _OPTIONAL)
    return QuantizedWeight(weight, codes, recipe, layouts, version, amax, interleave, order, values_dtype)


_CodesContext = tuple[WeightOrder, torch.dtype | None, tuple[str, ...]]


def _flatten_codes(value: WeightCodes) -> tuple[list[object], _CodesContext]:
    present = _present(value)
    return [getattr(value, name) for name in present], (value.order, value.values_dtype, present)


def _unflatten_codes(leaves: Iterable[Any], context: _CodesContext) -> WeightCodes:
    order, values_dtype, present = context
    return WeightCodes(**dict(zip(present, leaves, strict=True)), order=order, values_dtype=values_dtype)


pytree.register_pytree_node(QuantizedWeight, _flatten, _unflatten, serialized_type_name="octavo_torch.QuantizedWeight")
pytree.register_pytree_node(WeightCodes, _flatten_codes, _unflatten_codes)
