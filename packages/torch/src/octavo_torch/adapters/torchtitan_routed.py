"""torchtitan's RoutedExperts as one `moe_mlp`, whose experts may be spread over ranks; written for torchtitan 0.3.0.

torchtitan's `RoutedExperts` gets tokens and choices of this rank and composes a dispatcher with `GroupedExperts`. Here
its parameters, their sharding and whatever surrounds it (router, shared experts, FSDP, sequence and context
parallelism) stay, and its forward is one call: with an "ep" axis in the parallel dims, the `GroupedExperts`' parameters
are this rank's [E / ranks, ...], and the call's `ep=` is that axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from octavo import Recipe
from octavo_registry.contract.cards import Activation
from octavo_torch.adapters.grouped_mm import GroupedMM
from octavo_torch.adapters.torchtitan_types import Dims, Dispatcher, Experts, OurConfig, RoutedConfig, owner_of
from octavo_torch.arrays.checks import brief
from octavo_torch.arrays.per_group import concatenated
from octavo_torch.moe.forms import Form, WeightCodes, check_form, check_weight_codes
from octavo_torch.moe.moe import moe_mlp
from octavo_torch.moe.parallel.options import Exchange, Returns


class OurRoutedConfig(OurConfig, RoutedConfig, Protocol):
    """The configuration of RoutedExperts with what the override adds."""

    options: Options


class Formula(NamedTuple):
    """How a class of experts computes, in `moe_mlp`'s words; names are those of its parameters.

    first    what w1 is made of, the gate first
    """

    activation: Activation
    interleave: int | None
    first: tuple[str, ...]
    second: str
    bias1: str | None = None
    bias2: str | None = None


# by the qualified name of a class's method: a subclass with a method of its own computes something else
_FORMULAS = {
    "GroupedExperts.forward": Formula("swiglu", None, ("w1_EFD", "w3_EFD"), "w2_EDF"),
    "GptOssGroupedExperts.forward": Formula(
        "clamped_swiglu", 1, ("mlp1_weight_EGD",), "mlp2_weight_EDF", "mlp1_bias_EG", "mlp2_bias_ED"
    ),
}
_LIMIT = 7.0
"""The limit of clamped_swiglu."""


class ExchangeArguments(TypedDict, total=False):
    """The fields of an Exchange that can be given on a command line."""

    payload: str | None
    returns: Returns
    rows: int | None
    pair_rows: int | None


@dataclass(frozen=True)
class Options:
    """Arguments of `moe_mlp` that are the same in every call; those of its Exchange as a command line gives them.

    Raises ValueError for arguments that do not fit.
    """

    form: Form = "standard"
    weight_codes: WeightCodes = "keep"
    exchange: ExchangeArguments = field(default_factory=ExchangeArguments)

    def __post_init__(self) -> None:
        check_form(self.form)
        check_weight_codes(self.weight_codes)
        if not isinstance(self.exchange, Mapping) or not {*self.exchange} <= {*ExchangeArguments.__annotations__}:
            raise ValueError(
                f"exchange is {brief(self.exchange)}; give an object of payload, returns, rows and pair_rows, as "
                "octavo_torch.Exchange has them, or leave it out"
            )
        self.to_exchange()

    def to_exchange(self) -> Exchange:
        """The Exchange of these arguments."""
        return Exchange(**self.exchange)


def product_of(recipe: str, seed: int | None = None, backend: str | Sequence[str] | None = None) -> GroupedMM:
    """GroupedMM of a recipe's name or JSON text, the two forms that fit on a command line."""
    return GroupedMM(Recipe.from_json(recipe) if recipe.lstrip().startswith("{") else recipe, seed, backend)


def formula_of(config: object) -> Formula:
    """The formula of the experts that `config` builds; ValueError for experts that compute otherwise than its own."""
    owner = owner_of(config)
    forward, product = (getattr(owner, name).__qualname__ for name in ("forward", "_grouped_mm"))
    formula = _FORMULAS.get(forward)
    if formula is None or product != "GroupedExperts._grouped_mm":
        raise ValueError(
            f"inner_experts is {owner.__qualname__}, whose forward or product is its own; routed_experts takes "
            "GroupedExperts and GptOssGroupedExperts: leave out the converter or override that changes them, or use "
            "octavo_torch.adapters.torchtitan.grouped_experts"
        )
    limit = getattr(config, "swiglu_limit", _LIMIT)
    if limit != _LIMIT:
        raise ValueError(
            f"inner_experts' swiglu_limit is {limit} and clamped_swiglu's {_LIMIT}; use "
            "octavo_torch.adapters.torchtitan.grouped_experts"
        )
    return formula


def local_dispatcher(dispatcher: Dispatcher) -> object:
    """The configuration of a dispatcher that sends nothing and reserves no buffers: `moe_mlp` does all of that."""
    from torchtitan.models.common.token_dispatcher import (  # type: ignore[import-not-found,unused-ignore]
        LocalTokenDispatcher,
    )

    made: object = LocalTokenDispatcher.Config(num_experts=dispatcher.num_experts, top_k=dispatcher.top_k)
    return made


@lru_cache(maxsize=64)
def routed_class(parent: type) -> type:
    """A subclass of `parent`, a RoutedExperts class, as one `moe_mlp`.

    Its Config adds `recipe`, a name or JSON text, `seed` and `backend` as in GroupedMM, and `options`.
    """
    parent_config: type = parent.Config  # type: ignore[attr-defined]

    class OctavoRoutedExperts(parent):  # type: ignore[misc,valid-type,unused-ignore]
        @dataclass(kw_only=True, slots=True)
        class Config(parent_config):  # type: ignore[misc]
            recipe: str
            seed: int | None = None
            backend: str | Sequence[str] | None = None
            options: Options

        def __init__(self, config: OurRoutedConfig) -> None:
            super().__init__(config)
            self._product = product_of(config.recipe, config.seed, config.backend)
            self._options, self._formula = config.options, formula_of(config.inner_experts)
            self.ep: DeviceMesh | None = None

        def parallelize(self, parallel_dims: Dims) -> None:
            """torchtitan's sharding, and the ranks that share the experts."""
            mesh = parallel_dims.get_optional_mesh("ep")
            if self._formula.bias2 is not None and mesh is None and parallel_dims.tp_enabled:
                raise ValueError(
                    f"tensor parallelism of {parallel_dims.tp} ranks splits experts with biases, and every rank would "
                    "add the whole bias of the second layer; give expert_parallel_degree, or use "
                    "octavo_torch.adapters.torchtitan.grouped_experts"
                )
            super().parallelize(parallel_dims)
            self.ep = mesh

        def forward(
            self,
            x_BLD: Tensor,  # torchtitan's names are part of its sharding
            topk_scores_BLK: Tensor,
            topk_expert_ids_BLK: Tensor,
            num_local_tokens_per_expert_E: Tensor,
        ) -> Tensor:
            """[B, L, D]: the sum over each token's choices of score times expert."""
            x, scores, choices = (value.flatten(0, 1) for value in (x_BLD, topk_scores_BLK, topk_expert_ids_BLK))
            # octavo_torch.convert gives experts another product
            product: GroupedMM = getattr(self.inner_experts._grouped_mm, "product", self._product)
            formula, options = self._formula, self._options
            weights, ep = _weights(self.inner_experts, formula, self.ep), self.ep
            y = moe_mlp(
                x.bfloat16(), choices, scores, weights.w1, weights.w2, bias1=weights.bias1, bias2=weights.bias2,
                activation=formula.activation, interleave=formula.interleave, form=options.form,
                weight_codes=options.weight_codes, seed=product.seed_on(x.device), ep=ep,
                exchange=None if ep is None else options.to_exchange(), **product.how,
            )  # fmt: skip
            return y.type_as(x_BLD).view(x_BLD.shape)

    OctavoRoutedExperts.__name__ = OctavoRoutedExperts.__qualname__ = f"Octavo{parent.__name__}"
    return OctavoRoutedExperts


class _Weights(NamedTuple):
    w1: Tensor
    w2: Tensor
    bias1: Tensor | None
    bias2: Tensor | None


def _weights(experts: Experts, formula: Formula, ep: DeviceMesh | None) -> _Weights:
    """This rank's experts in bf16, in which torchtitan's compute, too."""
    ranks = 1 if ep is None else ep.size()
    if ep is not None and torch.compiler.is_compiling():
        raise ValueError(
            f"torch.compile traces experts of {ranks} ranks, and a traced graph holds no exchange; leave the model out "
            "of compile.components, or use octavo_torch.adapters.torchtitan.grouped_experts, where torchtitan "
            "exchanges the tokens"
        )

    def own(name: str) -> Tensor:
        value: Tensor = getattr(experts, name)
        value = value.to_local() if isinstance(value, DTensor) else value
        if value.shape[0] * ranks != experts.num_experts:
            raise ValueError(
                f"{name} has {value.shape[0]} experts here and {ranks} rank{'s' if ranks > 1 else ''} share "
                f"{experts.num_experts}; gather them before the layer runs: fully_shard the block, as torchtitan does, "
                "and not the experts alone"
            )
        return value.bfloat16()

    first = [own(name) for name in formula.first]
    bias1, bias2 = (None if name is None else own(name) for name in (formula.bias1, formula.bias2))
    return _Weights(first[0] if len(first) == 1 else concatenated(first, 1), own(formula.second), bias1, bias2)
