"""Routed experts of torchtitan on our grouped GEMM, written for torchtitan 0.3.0.

Use torchtitan's own override, on the command line:

    --override.imports 'octavo_torch.adapters.torchtitan.grouped_experts={"recipe": "block"}'

or in a configuration, `OverrideConfig(imports=[("octavo_torch.adapters.torchtitan.grouped_experts", {...})])`. Every
`GroupedExperts`, subclasses (gpt-oss) included, then multiplies with `GroupedMM` where it called `torch._grouped_mm`;
parameters, their names and their sharding stay. Sizes stay on the device and need no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from torch import Tensor

from octavo_torch.adapters.grouped_mm import GroupedMM, misfit

TESTED = "0.3.0"

try:
    from torchtitan.config.override import override  # type: ignore[import-not-found,unused-ignore]
    from torchtitan.models.common.moe import GroupedExperts  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise misfit("torchtitan", TESTED, "config.override and models.common.moe.GroupedExperts") from error
if not hasattr(GroupedExperts, "_grouped_mm"):
    raise misfit("torchtitan", TESTED, "GroupedExperts._grouped_mm")


@lru_cache(maxsize=64)
def experts_class(parent: type) -> Any:
    """A subclass of `parent`, a GroupedExperts class, with our product; its Config adds `recipe`, `seed`, `backend`.

    recipe    a recipe's name or its JSON text; seed, backend as in GroupedMM
    """
    parent_config: Any = parent.Config  # type: ignore[attr-defined]

    class OctavoExperts(parent):  # type: ignore[misc,valid-type,unused-ignore]
        @dataclass(kw_only=True, slots=True)
        class Config(parent_config):  # type: ignore[misc]
            recipe: str
            seed: int | None = None
            backend: str | Sequence[str] | None = None

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._product = product_of(config.recipe, config.seed, config.backend)

        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            return self._product(A, B_t, offs)

    OctavoExperts.__name__ = OctavoExperts.__qualname__ = f"Octavo{parent.__name__}"
    return OctavoExperts


def product_of(recipe: str, seed: int | None = None, backend: str | Sequence[str] | None = None) -> GroupedMM:
    """GroupedMM of a recipe's name or JSON text, the two forms that fit on a command line."""
    from octavo import Recipe

    return GroupedMM(Recipe.from_json(recipe) if recipe.lstrip().startswith("{") else recipe, seed, backend)


@override(target=GroupedExperts.Config, description="Octavo's grouped GEMM in routed experts")  # type: ignore[untyped-decorator,unused-ignore]
def grouped_experts(
    config: Any, *, recipe: str, seed: int | None = None, backend: str | Sequence[str] | None = None
) -> Any:
    """The configuration of the same experts with our product.

    Raises ValueError or OctavoError for arguments that do not fit.
    """
    product_of(recipe, seed, backend)  # refuses here, while the command line is parsed
    owner = type(config)._owner
    fields_of_config = {field.name: getattr(config, field.name) for field in fields(config) if field.init}
    return experts_class(owner).Config(**{**fields_of_config, "recipe": recipe, "seed": seed, "backend": backend})
