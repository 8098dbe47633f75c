"""Shared by the adapters: GroupedMM, which serves other libraries' grouped products, and errors about versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TypedDict

import torch
from torch import Tensor

from octavo import OctavoError, Recipe
from octavo_torch.arrays.checks import backend_names
from octavo_torch.dispatch.recipes import recipe_of
from octavo_torch.linear import arguments, functional
from octavo_torch.scaling.seeds import check_seed


class AdapterError(OctavoError, ImportError):
    """A library is absent, or lacks what its adapter needs; the message names the installed version."""


class HowToRun(TypedDict):
    """Keyword arguments that octavo_torch's functions share."""

    recipe: Recipe
    backend: str | Sequence[str] | None


@dataclass(frozen=True)
class GroupedMM:
    """`octavo_torch.grouped_mm` with a recipe, as a function of the operands alone: what other libraries call.

    recipe    a Recipe, or the name of one; None: high precision. Recipes with a state (delayed scaling) are refused,
              because a function has no place for it
    seed      of stochastic rounding; None: each product draws one from the device's generator, so that layers and steps
              differ, torch.manual_seed applies, and CUDA graphs draw a new one at each replay
    backend   a name or a closed list of names

    Raises ValueError for a recipe that it cannot run, OctavoError for an unknown name.
    """

    recipe: Recipe | str | None
    seed: int | Tensor | None = None
    backend: str | Sequence[str] | None = None
    draws_seeds: bool = field(init=False, repr=False, compare=False)
    """Whether each product draws a seed. It is worked out here, because a compiled function must not be the first to
    read `recipe.stochastic`: the recipe caches the answer, and this change of it would fail the guard that Dynamo has
    just made."""

    def __post_init__(self) -> None:
        recipe = recipe_of(self.recipe)
        if recipe.stateful:
            raise ValueError(
                f"recipe is {type(recipe).__name__}, which takes its scales from history, and a function has no "
                "place for a state; give CurrentScaling, or use a GroupedLinear instead"
            )
        check_seed(self.seed)
        object.__setattr__(self, "recipe", recipe)
        object.__setattr__(self, "backend", backend_names(self.backend))
        object.__setattr__(self, "draws_seeds", recipe.stochastic and self.seed is None)

    @property
    def how(self) -> HowToRun:
        """`recipe` and `backend`, as keyword arguments of octavo_torch's functions."""
        assert isinstance(self.recipe, Recipe)  # __post_init__ has resolved names
        return {"recipe": self.recipe, "backend": self.backend}

    def seed_on(self, device: torch.device) -> int | Tensor | None:
        """The seed of one product; None for recipes that round to nearest."""
        if not self.draws_seeds:
            return self.seed
        return torch.randint(torch.iinfo(torch.int64).max, (), device=device)

    def __call__(self, a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None) -> Tensor:
        """[M, N]: a [M, K] times b [G, K, N], any strides; offs [G] are the groups' ends, and rows past them are zero.

        bias   [G, N]
        """
        arguments.check_grouped_mm(a, b, offs, None)
        sizes = torch.diff(offs, prepend=offs.new_zeros(1))
        seed = self.seed_on(a.device)
        return functional.grouped_linear(a, b.transpose(1, 2), sizes, bias=bias, seed=seed, **self.how)


def misfit(distribution: str, tested: str, needed: str) -> AdapterError:
    """The error for a library without `needed`; names the installed version and the one that the adapter fits."""
    try:
        installed = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return AdapterError(
            f"{distribution} is not installed and its adapter needs {needed}; pip install {distribution}=={tested}"
        )
    return AdapterError(
        f"{distribution} {installed} has no {needed}, which this adapter needs; it was written for {distribution} "
        f"{tested}: install that version, or pass octavo_torch's functions in by hand"
    )
