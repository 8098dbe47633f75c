"""QuantizedWeight: weights quantized once and used by many microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from octavo import Recipe
from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.grouped_tensor import GroupedTensor
from octavo_torch.arrays.per_group import Weights, leaves_of, version_of
from octavo_torch.compiler.tracing import is_plain

Layouts = tuple[str | None, str | None]
"""Layouts of the rowwise and of the columnwise plane; None for a plane that is absent, or that no GEMM reads."""


@dataclass(eq=False)
class QuantizedWeight:
    """Weights [G, N, K] and their codes; takes the weight's place in `grouped_linear`. Made by `quantize_weight`.

    weight    the high-precision weights, which receive the gradient: one tensor, or one [N, K] a group
    codes     both directions where a gradient may be needed; None where no GEMM of the recipe reads quantized weights
    recipe    the recipe of the codes
    version   the weight's in-place version at that time: a weight that has changed since is refused; None where a
              compiled graph, which knows no versions, has computed the codes
    amax      fp32 [G] of delayed scaling: max |w| at that time; None for other recipes
    interleave  rows of a block where gate and up projection take turns in the weight, as grouped_mlp has it; 0: none do
    """

    weight: Weights
    codes: GroupedTensor | None
    recipe: Recipe
    layouts: Layouts | None
    version: int | None
    amax: Tensor | None = None
    interleave: int = 0

    def check(self, recipe: Recipe, layouts: Layouts | None) -> None:
        """ValueError where the codes do not fit the call, or are older than the weight."""
        self.check_made_for(recipe, layouts)
        known = self.version is not None and is_plain(leaves_of(self.weight)[0])
        if known and version_of(self.weight) != self.version:
            raise ValueError("weight has changed in place since quantize_weight; quantize it again")

    def check_made_for(self, recipe: Recipe, layouts: Layouts | None) -> None:
        """ValueError where the codes do not fit the recipe or the backend."""
        if recipe is not self.recipe and recipe.fingerprint != self.recipe.fingerprint:
            raise ValueError(
                f"weight was quantized for recipe {self.recipe.kind} ({self.recipe.fingerprint}) and the call's is "
                f"{recipe.kind} ({recipe.fingerprint}); quantize it for this one"
            )
        own = self.layouts or (None, None)
        if layouts is not None and any(a is not None and a != b for a, b in zip(layouts, own, strict=True)):
            raise ValueError(
                f"weight was quantized to layouts {self.layouts} and the chosen backend wants {layouts}; "
                "give quantize_weight and grouped_linear the same backend"
            )


def layouts_of(codes: GroupedTensor) -> Layouts:
    """The layouts of the planes that are there."""
    directions = codes.spec.quantizer.directions
    row, column = codes.spec.rowwise_layout, codes.spec.columnwise_layout
    return row if "rowwise" in directions else None, column if "columnwise" in directions else None


def check_own(name: str, quantized: object, own: Weights | None) -> None:
    """ValueError unless `quantized` comes from exactly the tensors of `own`."""
    if not isinstance(quantized, QuantizedWeight):
        raise ValueError(f"{name} is {brief(quantized)}; give what this module's quantize_{name} returned")
    ours, theirs = () if own is None else leaves_of(own), leaves_of(quantized.weight)
    if len(ours) != len(theirs) or any(a is not b for a, b in zip(ours, theirs, strict=True)):
        what, function = ("were", "quantize_weights") if name == "weights" else ("was", "quantize_weight")
        raise ValueError(f"{name} {what} not made by this module; give what its {function} returned")


_Context = tuple[Recipe, Layouts | None, int | None, int, tuple[str, ...]]


def _flatten(value: QuantizedWeight) -> tuple[list[object], _Context]:
    # what is not there is no leaf: torch.compile takes no None
    present = tuple(name for name in ("codes", "amax") if getattr(value, name) is not None)
    leaves = [value.weight, *(getattr(value, name) for name in present)]
    return leaves, (value.recipe, value.layouts, value.version, value.interleave, present)


def _unflatten(leaves: Iterable[Any], context: _Context) -> QuantizedWeight:
    weight, *rest = leaves
    recipe, layouts, version, interleave, present = context
    optional = dict(zip(present, rest, strict=True))
    return QuantizedWeight(weight, optional.get("codes"), recipe, layouts, version, optional.get("amax"), interleave)


pytree.register_pytree_node(QuantizedWeight, _flatten, _unflatten, serialized_type_name="octavo_torch.QuantizedWeight")
