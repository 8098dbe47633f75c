"""What the adapters share: how a grouped product of another library becomes one of ours, and whose version fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from octavo import HighPrecision, OctavoError, Recipe
from octavo import recipe as recipe_named
from octavo_torch.arrays.checks import backend_names, told
from octavo_torch.linear import arguments, functional
from octavo_torch.scaling.seeds import check_seed

_HIGH_PRECISION = HighPrecision()


class AdapterError(OctavoError, ImportError):
    """A library is absent, or lacks what its adapter holds on to; the message names the version that was found."""


@dataclass(frozen=True)
class GroupedMM:
    """`grouped_mm` with everything but its operands.

    recipe    None: high precision; its name: with its defaults. None that keeps state (delayed scaling): a function has
              no place for it
    seed      of stochastic rounding; None: each product draws one from torch's generator of its device, so layers and
              steps differ, torch.manual_seed decides and CUDA graphs draw anew at each replay
    backend   a name or a closed list of names

    Raises ValueError for a recipe that it cannot run, OctavoError for a name that is none.
    """

    recipe: Recipe | str | None
    seed: int | Tensor | None = None
    backend: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        recipe = recipe_of(self.recipe)
        if recipe.stateful:
            raise ValueError(
                f"recipe is {type(recipe).__name__}, which takes its scales from history, and this seam is a function "
                "that keeps none; give CurrentScaling, or a GroupedLinear its place"
            )
        check_seed(self.seed)
        object.__setattr__(self, "recipe", recipe)
        object.__setattr__(self, "backend", backend_names(self.backend))

    @property
    def how(self) -> dict[str, Any]:
        """`recipe` and `backend`, as keyword arguments of octavo_torch's functions."""
        return {"recipe": self.recipe, "backend": self.backend}

    def seed_on(self, device: torch.device) -> int | Tensor | None:
        """The seed of one product; None for recipes that round to nearest."""
        assert isinstance(self.recipe, Recipe)
        if not self.recipe.stochastic or self.seed is not None:
            return self.seed
        return torch.randint(torch.iinfo(torch.int64).max, (), device=device)

    def __call__(self, a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None) -> Tensor:
        """a [M, K] times b [G, K, N], any strides, by cumulative ends offs [G]; rows past the last one are zero.

        bias   [G, N]
        """
        arguments.check_grouped_mm(a, b, offs, None)
        sizes = torch.diff(offs, prepend=offs.new_zeros(1))
        seed = self.seed_on(a.device)
        return functional.grouped_linear(a, b.transpose(1, 2), sizes, bias=bias, seed=seed, **self.how)


def recipe_of(recipe: Any) -> Recipe:
    """A recipe, of that name, or HighPrecision for None; ValueError for anything else."""
    found = _HIGH_PRECISION if recipe is None else recipe_named(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(found, Recipe):
        raise ValueError(f"recipe is {told(recipe)}; give a Recipe or the name of one")
    return found


def misfit(distribution: str, tested: str, what: str) -> AdapterError:
    """The error for a library that has no `what`: the version found, and the one that the adapter was written for."""
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return AdapterError(
            f"{distribution} is not installed and its adapter needs {what}; pip install {distribution}=={tested}"
        )
    return AdapterError(
        f"{distribution} {found} has no {what}, which this adapter holds on to; it was written for {distribution} "
        f"{tested}: install that version, or pass octavo_torch's functions in by hand"
    )
