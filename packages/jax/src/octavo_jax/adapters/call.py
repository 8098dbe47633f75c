"""What the adapters share: Octavo's ragged_dot, with a recipe, in the place of another library's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.arrays.recipes import RecipeLike
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.linear.ragged import ragged_dot

Seed = int | Array | Callable[[], int | Array] | None
"""A seed of stochastic rounding, or a function that is called for one each time a product is traced."""


@dataclass(frozen=True)
class RaggedDot:
    """A function like `jax.lax.ragged_dot` that computes by a recipe.

    recipe            a Recipe, or the name of one; None: high precision
    seed              of stochastic rounding, see `Seed`
    checkpoint_name   of the quantized operands
    backend           the name of a backend, or a closed list of names
    """

    recipe: RecipeLike
    seed: Seed = None
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME
    backend: BackendNames = None

    def __call__(self, lhs: Any, rhs: Any, group_sizes: Any, *rest: Any, **more: Any) -> Array:
        """The product; it takes the arguments of `jax.lax.ragged_dot`."""
        return ragged_dot(
            lhs,
            rhs,
            group_sizes,
            *rest,
            **more,
            recipe=self.recipe,
            seed=self.seed() if callable(self.seed) else self.seed,
            checkpoint_name=self.checkpoint_name,
            backend=self.backend,
        )
