"""Routed experts of torchtitan on our grouped GEMM, or whole on `moe_mlp`; written for torchtitan 0.3.0.

Use torchtitan's own overrides, on the command line:

    --override.imports 'octavo_torch.adapters.torchtitan.grouped_experts={"recipe": "block"}'
    --override.imports 'octavo_torch.adapters.torchtitan.routed_experts={"recipe": "block"}'

or in a configuration, `OverrideConfig(imports=[("octavo_torch.adapters.torchtitan.grouped_experts", {...})])`.
Parameters, their names and their sharding stay.

grouped_experts   every `GroupedExperts`, subclasses (gpt-oss) included, multiplies with `GroupedMM` where it called
                  `torch._grouped_mm`. Sizes stay on the device and need no padding; torchtitan's dispatcher sorts
                  tokens and sends them to other ranks
routed_experts    every `RoutedExperts` is one `moe_mlp`, from tokens to combined tokens; with expert parallelism its
                  `ep=` takes the place of torchtitan's dispatcher. See octavo_torch.adapters.torchtitan_routed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal

from torch import Tensor

from octavo_torch.adapters.grouped_mm import misfit
from octavo_torch.adapters.torchtitan_routed import (
    ExchangeArguments,
    Options,
    formula_of,
    local_dispatcher,
    product_of,
    routed_class,
)
from octavo_torch.adapters.torchtitan_types import OurConfig, RoutedConfig, owner_of

TESTED = "0.3.0"

try:
    from torchtitan.config.override import override  # type: ignore[import-not-found,unused-ignore]
    from torchtitan.models.common.moe import (  # type: ignore[import-not-found,unused-ignore]
        GroupedExperts,
        RoutedExperts,
    )
except ImportError as error:
    raise misfit("torchtitan", TESTED, "config.override and models.common.moe.RoutedExperts") from error
if not hasattr(GroupedExperts, "_grouped_mm"):
    raise misfit("torchtitan", TESTED, "GroupedExperts._grouped_mm")


@lru_cache(maxsize=64)
def experts_class(parent: type) -> type:
    """A subclass of `parent`, a GroupedExperts class, with our product; its Config adds `recipe`, `seed`, `backend`.

    recipe    a recipe's name or its JSON text; seed, backend as in GroupedMM
    """
    parent_config: type = parent.Config  # type: ignore[attr-defined]

    class OctavoExperts(parent):  # type: ignore[misc,valid-type,unused-ignore]
        @dataclass(kw_only=True, slots=True)
        class Config(parent_config):  # type: ignore[misc]
            recipe: str
            seed: int | None = None
            backend: str | Sequence[str] | None = None

        def __init__(self, config: OurConfig) -> None:
            super().__init__(config)
            self._product = product_of(config.recipe, config.seed, config.backend)

        def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
            return self._product(A, B_t, offs)

    OctavoExperts.__name__ = OctavoExperts.__qualname__ = f"Octavo{parent.__name__}"
    return OctavoExperts


@override(target=GroupedExperts.Config, description="Octavo's grouped GEMM in routed experts")  # type: ignore[untyped-decorator,unused-ignore]
def grouped_experts(
    config: object, *, recipe: str, seed: int | None = None, backend: str | Sequence[str] | None = None
) -> object:
    """The configuration of the same experts with our product.

    Raises ValueError or OctavoError for arguments that do not fit.
    """
    product_of(recipe, seed, backend)  # refuses here, while the command line is parsed
    return _like(config, experts_class(owner_of(config)), recipe=recipe, seed=seed, backend=backend)


@override(target=RoutedExperts.Config, description="Octavo's MoE layer, over ranks, too")  # type: ignore[untyped-decorator,unused-ignore]
def routed_experts(
    config: RoutedConfig,
    *,
    recipe: str,
    seed: int | None = None,
    backend: str | Sequence[str] | None = None,
    form: Literal["keep_all", "standard", "lean", "recompute"] = "standard",
    weight_codes: Literal["keep", "remake"] = "keep",
    exchange: ExchangeArguments | None = None,
) -> object:
    """The configuration of the same experts as one `moe_mlp`.

    recipe               its name or its JSON text
    form, weight_codes   as in moe_mlp
    exchange             arguments of octavo_torch.Exchange, such as {"payload": "mxfp8", "returns": "sums"}

    Raises ValueError or OctavoError for arguments that do not fit, and for experts that compute otherwise than
    torchtitan's own.
    """
    product_of(recipe, seed, backend)  # refuses here, while the command line is parsed
    formula_of(config.inner_experts)
    options = Options(form, weight_codes, {} if exchange is None else exchange)
    return _like(
        config, routed_class(owner_of(config)), recipe=recipe, seed=seed, backend=backend, options=options,
        token_dispatcher=local_dispatcher(config.token_dispatcher),
    )  # fmt: skip


def _like(config: object, owner: type, **changes: object) -> object:
    """A Config of `owner` with the fields of `config`, except for `changes`."""
    of_dataclass = fields(config)  # type: ignore[arg-type]
    given = {field.name: getattr(config, field.name) for field in of_dataclass if field.init}
    made: object = owner.Config(**(given | changes))  # type: ignore[attr-defined]
    return made
