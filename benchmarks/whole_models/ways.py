"""What may serve the experts of a model of transformers, its attention's projections and its norms, by a short name."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from octavo_torch import convert_linears
from octavo_torch.adapters.transformers import register

THEIRS = "grouped_mm"
"""transformers' own grouped products, which every other way is compared with."""
RECIPES = ("bf16", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "mxfp8-folded", "mxfp4", "nvfp4")
"""The adapter keeps nothing between calls, so delayed scaling has no place in it."""
LINEARS = "linears"
"""The part of a way's name that has the attention's projections in the way's recipe, too; else they are torch's."""
NORMS = "norms"
"""The part of a way's name that has every RMSNorm computed by torch's `rms_norm`; else by transformers' operations."""
PROJECTIONS = "model.layers.*.self_attn.*_proj"


def implementation(way: str) -> str:
    """The experts implementation of `grouped_mm`, or of RECIPE[/FORM[/WEIGHT_CODES]] through the adapter."""
    recipe, *kept = (part for part in way.split("/") if part not in (LINEARS, NORMS))
    if recipe == THEIRS:
        return THEIRS
    options = dict(zip(("form", "weight_codes"), kept, strict=False))
    return register(recipe, name="/".join((f"octavo-{recipe}", *kept)), **options)  # type: ignore[arg-type]


def normalize(norm: Any, x: Tensor) -> Tensor:
    """What an RMSNorm of transformers computes, in one kernel each way, and rounded once where Qwen3's rounds twice."""
    return functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


class Served:
    """A model that the ways serve in turn; its parameters are the same in all of them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._projections = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and fnmatchcase(name, PROJECTIONS)
        }
        self._norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]

    def by(self, way: str) -> None:
        """From now on `way` serves it."""
        self.model.set_experts_implementation(implementation(way))
        for name, module in self._projections.items():
            self.model.set_submodule(name, module)
        recipe, *parts = way.split("/")
        if LINEARS in parts:
            convert_linears(self.model, recipe, PROJECTIONS)
        for norm in self._norms:
            norm.forward = partial(normalize if NORMS in parts else type(norm).forward, norm)
