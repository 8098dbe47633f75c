"""A grouped MLP resolved through the registry: its two layers, what stands between them, and what of it is fused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import Recipe
from octavo_registry.contract.cards import Activation
from octavo_torch.arrays.checks import check_recipe
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.dispatch.layer import Layer, layer_for
from octavo_torch.dispatch.layer import Run as SizesRun
from octavo_torch.dispatch.memo import Kept
from octavo_torch.quantizers.fused import Fused, Run, activation_quantizer, gradient_quantizer


@dataclass(frozen=True)
class Wanted:
    """Which gradients a call of an MLP shall make; `between`: any before the activation, its probabilities' too."""

    x: bool = False
    w1: bool = False
    w2: bool = False
    between: bool = False


class MlpPlan:
    """What one call of a grouped MLP runs, for one dtype, device, pair of weight shapes and set of gradients.

    Printable: a line an operation.

    fc1, fc2    the two layers. fc1's result has x's dtype, whatever the recipe's output_dtype
    act, dact   the quantizers around the activation: fused with it, or composed
    prepare     makes of group sizes what everything here takes in their place; None: sizes as they are
    """

    __slots__ = ("act", "activation", "dact", "fc1", "fc2", "prepare", "recipe", "run_act", "run_dact")

    def __init__(self, recipe: Recipe, activation: Activation, fc1: Layer, fc2: Layer) -> None:
        self.recipe, self.activation, self.fc1, self.fc2 = recipe, activation, fc1, fc2
        self.act = activation_quantizer(fc2, activation)
        self.dact = gradient_quantizer(fc1, activation)
        self.run_act: Run | None = self.act.run
        self.run_dact: Run | None = self.dact.run
        prepares = [fc1.prepare, fc2.prepare, *(part.plan.prepare for part in (self.act, self.dact) if part.plan)]
        # sizes that one backend prepared are nothing to another
        self.prepare: SizesRun | None = prepares[0] if prepares.count(prepares[0]) == len(prepares) else None

    @property
    def fused(self) -> dict[str, Fused]:
        """What stands between the two layers, by name: "activation", and where it is wanted "gradient"."""
        made = {"activation": self.act}
        return made | {"gradient": self.dact} if self.fc1.need_dx or self.fc1.need_dw else made

    def __str__(self) -> str:
        lines = ["fc1", *_indented(self.fc1.plan), f"{self.activation}{_quantize(self.act)}: {self.act}"]
        if "gradient" in self.fused:
            lines.append(f"{self.activation}'s gradient + bias gradient{_quantize(self.dact)}: {self.dact}")
        return "\n".join([*lines, "fc2", *_indented(self.fc2.plan)])


def _quantize(part: Fused) -> str:
    return " + quantize" if part.codes else ""


def _indented(plan: object) -> list[str]:
    return [f"  {line}" for line in str(plan).splitlines()]


_plans: Kept[MlpPlan] = Kept()


def mlp_plan_for(
    recipe: Recipe,
    activation: Activation,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    at_host: bool,
    wanted: Wanted,
    backend: str | tuple[str, ...] | None,
    graph_safe: bool = False,
) -> MlpPlan:
    """The plan for operands that fit together, kept by the recipe's identity: a recipe does not change."""
    key = (
        id(recipe), activation, x.dtype, x.device, w1.shape, w2.shape, at_host, wanted.x, wanted.w1, wanted.w2,
        wanted.between, backend, graph_safe,
    )  # fmt: skip

    def planned() -> MlpPlan:
        check_recipe(recipe)
        fc1 = layer_for(_inner(recipe, x.dtype), x, w1, at_host, wanted.x, wanted.w1, backend, graph_safe)
        fc2 = layer_for(recipe, x, w2, at_host, wanted.between, wanted.w2, backend, graph_safe)
        return MlpPlan(recipe, activation, fc1, fc2)

    return _plans.get(key, planned, recipe)


_inner_recipes: dict[int, tuple[Recipe, Recipe]] = {}


def _inner(recipe: Recipe, dtype: torch.dtype) -> Recipe:
    """`recipe` for fc1, whose result the activation reads in x's dtype; one object each, by which layers are found."""
    if recipe.output_dtype in (None, DTYPE_NAMES[dtype]):
        return recipe
    known = _inner_recipes.get(id(recipe))
    if known is not None and known[0] is recipe:
        return known[1]
    if len(_inner_recipes) >= 256:
        _inner_recipes.clear()
    made = type(recipe)(**{**recipe.model_dump(), "output_dtype": None})
    _inner_recipes[id(recipe)] = (recipe, made)
    return made
