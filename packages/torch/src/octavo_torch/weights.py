"""QuantizedWeight: weights quantized once and used by many microbatches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from octavo import Recipe
from octavo_torch.grouped_tensor import GroupedTensor
from octavo_torch.tracing import is_plain


@dataclass(eq=False)
class QuantizedWeight:
    """Weights [G, N, K] and their codes; takes the weight's place in `grouped_linear`. Made by `quantize_weight`.

    weight    the high-precision weights, which receive the gradient
    codes     both directions where a gradient may be wanted; None where no GEMM of the recipe reads quantized weights
    recipe    the recipe it was made for
    version   the weight's in-place version at that time: a weight that has changed since is refused
    """

    weight: Tensor
    codes: GroupedTensor | None
    recipe: Recipe
    layouts: tuple[str, str] | None
    version: int

    def check(self, recipe: Recipe, layouts: tuple[str, str] | None) -> None:
        """ValueError where the codes do not fit the call, or are older than the weight."""
        if recipe is not self.recipe and recipe.fingerprint != self.recipe.fingerprint:
            raise ValueError(
                f"weight was quantized for recipe {self.recipe.kind} ({self.recipe.fingerprint}) and the call's is "
                f"{recipe.kind} ({recipe.fingerprint}); quantize it for this one"
            )
        if layouts is not None and layouts != self.layouts:
            raise ValueError(
                f"weight was quantized to layouts {self.layouts} and the chosen backend wants {layouts}; "
                "give quantize_weight and grouped_linear the same backend"
            )
        if is_plain(self.weight) and self.weight._version != self.version:
            raise ValueError("weight has changed in place since quantize_weight; quantize it again")


def _flatten(value: QuantizedWeight) -> tuple[list[Any], tuple[Any, ...]]:
    leaves: list[Any] = [value.weight] if value.codes is None else [value.weight, value.codes]
    return leaves, (value.recipe, value.layouts, value.version)


def _unflatten(leaves: Iterable[Any], context: Any) -> QuantizedWeight:
    weight, *codes = leaves
    return QuantizedWeight(weight, codes[0] if codes else None, *context)


pytree.register_pytree_node(QuantizedWeight, _flatten, _unflatten, serialized_type_name="octavo_torch.QuantizedWeight")
