"""What may serve the experts of a model of transformers, and the projections of its attention, by a short name."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from octavo_torch import convert_linears
from octavo_torch.adapters.transformers import register

THEIRS = "grouped_mm"
"""transformers' own grouped products, which every other way is compared with."""
RECIPES = ("bf16", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "mxfp8-folded", "mxfp4", "nvfp4")
"""The adapter keeps nothing between calls, so delayed scaling has no place in it."""
LINEARS = "linears"
"""The part of a way's name that has the attention's projections in the way's recipe, too; else they are torch's."""
PROJECTIONS = "model.layers.*.self_attn.*_proj"


def implementation(way: str) -> str:
    """The experts implementation of `grouped_mm`, or of RECIPE[/FORM[/WEIGHT_CODES]][/linears] through the adapter."""
    if way == THEIRS:
        return THEIRS
    recipe, *kept = (part for part in way.split("/") if part != LINEARS)
    options = dict(zip(("form", "weight_codes"), kept, strict=False))
    return register(recipe, name="/".join((f"octavo-{recipe}", *kept)), **options)  # type: ignore[arg-type]


class Served:
    """A model that the ways serve in turn; its parameters are the same in all of them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._projections = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and fnmatchcase(name, PROJECTIONS)
        }

    def by(self, way: str) -> None:
        """From now on `way` serves it."""
        self.model.set_experts_implementation(implementation(way))
        for name, module in self._projections.items():
            self.model.set_submodule(name, module)
        recipe, *parts = way.split("/")
        if LINEARS in parts:
            convert_linears(self.model, recipe, PROJECTIONS)
