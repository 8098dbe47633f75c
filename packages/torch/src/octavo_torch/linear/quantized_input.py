"""Inputs that are quantized before the call: a GroupedTensor, or a QuantizedInput, which can have a gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from octavo import QuantizerSpec, Recipe
from octavo.grouped_tensor import PLAIN
from octavo_torch.arrays.grouped_tensor import GroupedTensor, check_planes
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.arrays.versioned import Versioned
from octavo_torch.dispatch.layer import Layer


@dataclass(eq=False)
class QuantizedInput(Versioned):
    """Rows [M, K] and their codes, to be given as x to any number of calls. Made by `quantize_input`.

    x            the high-precision rows, which receive the gradient, and which a high-precision slot reads
    codes        in the directions that the GEMMs read; None if no GEMM of the recipe reads quantized rows
    group_sizes  [G], those of the codes
    recipe       the recipe of the codes
    version      x's in-place version when it was quantized: if it has changed since, the codes are refused. None if it
                 is not known, because a compiled graph or torch.inference_mode has made the codes or the rows
    """

    x: Tensor
    codes: GroupedTensor | None
    group_sizes: Tensor
    recipe: Recipe
    version: int | None

    @property
    def made_of(self) -> Tensor:
        """The rows, whose version counts."""
        return self.x

    def check(self, recipe: Recipe) -> None:
        """ValueError where the codes do not fit the call, or are older than the rows."""
        if recipe is not self.recipe and recipe.fingerprint != self.recipe.fingerprint:
            raise ValueError(
                f"x was quantized for recipe {self.recipe.kind} ({self.recipe.fingerprint}) and the call's is "
                f"{recipe.kind} ({recipe.fingerprint}); quantize it for this one"
            )
        if self.outdated:
            raise ValueError("x has changed in place since quantize_input; quantize it again")


QUANTIZED = (GroupedTensor, QuantizedInput)
"""The types of x that hold codes."""


def rows_of(
    x: GroupedTensor | QuantizedInput, weight: object, group_sizes: GroupSizes | None, recipe: Recipe
) -> tuple[Tensor, GroupedTensor | None, Tensor]:
    """A tensor of x's shape, the codes, and the codes' sizes.

    For a GroupedTensor, which has no values, the tensor is a placeholder in the weight's dtype: nothing may read it.
    """
    if group_sizes is not None and group_sizes is not x.group_sizes:
        raise ValueError("group_sizes was given with an x that is quantized and has its own; give None")
    if isinstance(x, QuantizedInput):
        x.check(recipe)
        return x.x, x.codes, x.group_sizes
    if x.group_sizes is None:
        raise ValueError(f"x is {x!r}, stacked matrices; give quantized rows [M, K]")
    if not isinstance(weight, Tensor):
        raise ValueError(f"weight is a {type(weight).__name__}; give a tensor [G, N, K]")
    return weight.new_empty(()).expand(x.spec.shape), x, x.group_sizes


def check_codes(layer: Layer, recipe: Recipe, x: object, codes: GroupedTensor) -> None:
    """ValueError unless the codes of `x` are those of the recipe's quantizer, in the directions and layouts that the
    layer's GEMMs read."""
    if isinstance(x, GroupedTensor):
        _check_spec(layer, recipe, x.spec.quantizer)
        check_planes("x", x)
    read = {"rowwise": layer.quantized_fprop, "columnwise": layer.need_dw and layer.quantized_wgrad}
    layouts = (codes.spec.rowwise_layout, codes.spec.columnwise_layout)
    chosen = layer.x_layouts or (PLAIN, PLAIN)
    for (direction, is_read), layout, expected in zip(read.items(), layouts, chosen, strict=True):
        if not is_read:
            continue
        codes.plane(direction)  # type: ignore[arg-type]
        if layout not in (expected, PLAIN):
            reads = " or ".join(map(repr, dict.fromkeys((expected, PLAIN))))
            raise ValueError(
                f"x's {direction} data are in layout {layout!r} and the chosen backend reads {reads}; "
                "quantize it with quantize_input for this layer"
            )


def _check_spec(layer: Layer, recipe: Recipe, actual: QuantizerSpec) -> None:
    needed = recipe.quantizer("x")
    if needed is None or not layer.quantized_fprop or (layer.need_dw and not layer.quantized_wgrad):
        raise ValueError(
            f"x is a GroupedTensor and recipe {recipe.kind} has a slot that reads it unquantized; give the tensor, or "
            "what quantize_input made of it"
        )
    if _identity(actual) != _identity(needed):
        raise ValueError(f"x was quantized by {actual!r} and the recipe's quantizer of x is {needed!r}; use that one")


def _identity(spec: QuantizerSpec) -> dict[str, object]:
    """The fields on which codes depend."""
    return {name: value for name, value in dict(spec).items() if name not in ("orientation", "checkpoint_name")}


def _flatten(value: QuantizedInput) -> tuple[list[object], tuple[Recipe, int | None]]:
    leaves: list[object] = [value.x, value.group_sizes]
    return leaves if value.codes is None else [*leaves, value.codes], (value.recipe, value.version_for_graphs())


def _unflatten(leaves: Iterable[Any], context: tuple[Recipe, int | None]) -> QuantizedInput:
    x, group_sizes, *codes = leaves
    return QuantizedInput(x, codes[0] if codes else None, group_sizes, *context)


pytree.register_pytree_node(QuantizedInput, _flatten, _unflatten, serialized_type_name="octavo_torch.QuantizedInput")
