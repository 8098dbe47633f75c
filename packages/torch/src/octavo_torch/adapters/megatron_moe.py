"""Megatron-LM's MoE layer as one MoE layer of ours, whose experts may be over ranks; written for megatron-core 0.16.1.

    from octavo_torch.adapters.megatron_moe import moe_layer

    spec.submodules.mlp.module = moe_layer(octavo.recipe("block"))  # of a layer whose mlp is a MoELayer

The router, shared experts, parameters, their names and distributed checkpoints are Megatron's and those of
octavo_torch.adapters.megatron; its token dispatcher is not used. Tokens go to the experts of
`expert_model_parallel_size` ranks, and come back, as `octavo_torch.MoE` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from octavo import Recipe
from octavo_registry.contract.cards import Activation
from octavo_torch.adapters.grouped_mm import misfit
from octavo_torch.adapters.megatron import TESTED, ExpertLinear, builders
from octavo_torch.adapters.megatron_types import MoeConfig, ProcessGroups
from octavo_torch.arrays.per_group import Weights
from octavo_torch.moe import moe
from octavo_torch.moe.call import MoeCall
from octavo_torch.moe.forms import Form, WeightCodes, check_form, check_weight_codes
from octavo_torch.moe.parallel.group import ExpertGroup
from octavo_torch.moe.parallel.options import Exchange, check_exchange

try:
    from megatron.core.activations import quick_gelu, squared_relu  # type: ignore[import-not-found,unused-ignore]
    from megatron.core.transformer.mlp import MLPSubmodules  # type: ignore[import-not-found,unused-ignore]
    from megatron.core.transformer.moe.experts import TEGroupedMLP  # type: ignore[import-not-found,unused-ignore]
    from megatron.core.transformer.moe.moe_layer import MoELayer  # type: ignore[import-not-found,unused-ignore]
    from megatron.core.transformer.moe.moe_utils import (  # type: ignore[import-not-found,unused-ignore]
        get_default_pg_collection,
    )
    from megatron.core.transformer.moe.token_dispatcher import (  # type: ignore[import-not-found,unused-ignore]
        MoETokenDispatcher,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    raise misfit("megatron-core", TESTED, "transformer.moe.moe_layer.MoELayer") from error


@dataclass(frozen=True)
class Options:
    """What a layer keeps for the backward, and how its tokens reach other ranks: arguments of `moe_mlp`."""

    form: Form
    weight_codes: WeightCodes
    exchange: Exchange


def moe_layer(
    recipe: Recipe | None,
    *,
    backend: str | Sequence[str] | None = None,
    seed: int | None = None,
    form: Literal["keep_all", "standard", "lean", "recompute"] = "standard",
    weight_codes: Literal["keep", "remake"] = "keep",
    exchange: Exchange | None = None,
) -> type[Layer]:
    """A class to use instead of Megatron's MoELayer; it replaces the experts among its submodules.

    recipe, backend, seed          as in octavo_torch.adapters.megatron.builders
    form, weight_codes, exchange   as in moe_mlp

    Building such a layer raises ValueError for a configuration that it cannot follow.
    """
    options = Options(check_form(form), check_weight_codes(weight_codes), check_exchange(exchange))
    fc1, fc2 = (type(each.__name__, (Operands, each), {}) for each in builders(recipe, backend=backend, seed=seed))
    experts = type("OctavoExperts", (Experts,), {"options": options})
    spec = ModuleSpec(module=experts, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2))
    return type("OctavoMoELayer", (Layer,), {"experts_spec": spec})


class Layer(MoELayer):  # type: ignore[misc]
    """`MoELayer` whose dispatcher moves nothing; `moe_layer` returns subclasses.

    Megatron hands its process groups to its own class alone: where they are not the global ones, give
    `ModuleSpec(..., params={"pg_collection": groups})`.
    """

    experts_spec: ModuleSpec

    def __init__(
        self,
        config: MoeConfig,
        submodules: object,
        layer_number: int | None = None,
        pg_collection: ProcessGroups | None = None,
    ) -> None:
        groups: ProcessGroups = get_default_pg_collection() if pg_collection is None else pg_collection
        check_config(config, groups)
        with_ours = replace(submodules, experts=self.experts_spec)  # type: ignore[type-var]
        super().__init__(config, with_ours, layer_number, groups)
        self.token_dispatcher = LocalDispatcher(config, groups)


class LocalDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Turns Megatron's routing into choices [T, k] and weights [T, k]; it moves no tokens, because Experts does."""

    _choices: Tensor | None = None

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [T, H], and the weights of their choices."""
        self._shape = tokens.shape
        self._choices = choices = choices_of(routing_map, self.config.moe_router_topk)
        # a choice of -1 reads the weight of expert 0, which gets no gradient from it
        weights = probs.gather(1, choices.clamp_min(0))
        return tokens.reshape(-1, tokens.shape[-1]), weights if weights.dtype is not torch.float64 else weights.float()

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """The arguments."""
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Tokens, choices and weights, as Experts takes them."""
        choices, self._choices = self._choices, None
        return hidden_states, choices, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The argument."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """The argument."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """The result in the shape that the tokens came in."""
        return hidden_states.view(self._shape)


def choices_of(routing_map: Tensor, k: int) -> Tensor:
    """int64 [T, k]: the experts that are true in bool [T, E], in their order; -1 where a token has fewer than k."""
    numbers = torch.arange(routing_map.shape[1], device=routing_map.device).expand_as(routing_map)
    place = torch.where(routing_map, routing_map.cumsum(1) - 1, k)
    choices = numbers.new_full((routing_map.shape[0], k + 1), -1)
    return choices.scatter_(1, place, numbers)[:, :k]


class Operands(ExpertLinear):
    """One of the experts' two layers. Its forward computes nothing: it returns the weights and biases, with the hooks
    around it, for Experts to run both layers as one."""

    def forward(self) -> tuple[Weights, Weights | None]:  # type: ignore[override]
        """One weight per expert, and one bias."""
        if self._modules:
            raise ValueError(
                "a layer of experts has adapters, and moe_layer runs both layers as one; use "
                "octavo_torch.adapters.megatron.builders with Megatron's own MoELayer"
            )
        if self.training:
            self.notice_unused_amax(self.weights)
        biases = self.biases
        if self._returns_bias:
            biases = [getattr(self, f"bias{index}") for index in range(self.num_groups)]
        return self.weights, biases


class Experts(TEGroupedMLP):  # type: ignore[misc]
    """This rank's experts: tokens [T, H], choices [T, k] among all experts, and weights [T, k], to [T, H]."""

    options: Options

    def __init__(
        self, num_local_experts: int, config: MoeConfig, submodules: object, pg_collection: ProcessGroups
    ) -> None:
        super().__init__(num_local_experts, config, submodules, pg_collection)
        group = pg_collection.ep
        self._group = None if group is None or group.size() == 1 else ExpertGroup(group)
        self._activation = activation_of(config)

    def forward(self, tokens: Tensor, choices: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Send tokens to their experts, run both layers, and bring the results back; no bias is left to add."""
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        (w1, bias1), (w2, bias2) = fc1(), fc2()
        if fc1.recipe is not fc2.recipe and fc1.recipe != fc2.recipe:
            raise ValueError(
                f"the recipes of the experts' layers are {fc1.recipe.kind} ({fc1.recipe.fingerprint}) and "
                f"{fc2.recipe.kind} ({fc2.recipe.fingerprint}), and moe_layer runs both as one; convert both"
            )
        state1, state2 = fc1.delayed_state, fc2.delayed_state
        stores = fc1.delayed_wgrad, fc2.delayed_wgrad
        call = MoeCall(
            recipe=fc1.recipe,
            backend=fc1.backend,
            seed=fc1.seed,
            second_seed=fc2.seed,
            record=self.training,
            main_grad=fc1.main_grad,
            room=fc1.room,
            activation=self._activation,
            states=None if state1 is None or state2 is None else (state1, state2),
            delayed_wgrad=None if stores == (None, None) else stores,
            probes=(fc1.probes[0], fc2.probes[0]) if fc1.probes and fc2.probes else None,
            form=self.options.form,
            weight_codes=self.options.weight_codes,
            ep=self._group,
            exchange=None if self._group is None else self.options.exchange,
        )
        return moe.run(tokens, w1, w2, moe.Routed(choices, weights, bias1, bias2), call), None


def activation_of(config: MoeConfig) -> Activation:
    """The name in `moe_mlp` of what a TransformerConfig computes between both layers; ValueError for something else."""
    functional = nn.functional
    plain = (config.activation_func_clamp_value, config.glu_linear_offset) == (None, 0.0)
    known: dict[tuple[bool, Callable[..., Tensor]], Activation] = {
        (True, functional.silu): "swiglu", (True, functional.gelu): "geglu", (False, functional.silu): "silu",
        (False, functional.gelu): "gelu", (False, squared_relu): "relu2",
    }  # fmt: skip
    gated, function = bool(config.gated_linear_unit), config.activation_func
    if plain and (gated, function) in known:
        return known[gated, function]
    if gated and function is quick_gelu and (config.activation_func_clamp_value, config.glu_linear_offset) == (7, 1):
        return "clamped_swiglu"
    raise ValueError(
        f"activation_func is {getattr(function, '__name__', function)!r}, gated_linear_unit {gated}, "
        f"activation_func_clamp_value {config.activation_func_clamp_value} and glu_linear_offset "
        f"{config.glu_linear_offset}; moe_layer has silu, gelu and squared_relu, gated silu and gelu, and gpt-oss's "
        "gated quick_gelu with 7 and 1: use octavo_torch.adapters.megatron.builders with Megatron's own MoELayer"
    )


def check_config(config: MoeConfig, groups: ProcessGroups) -> None:
    """ValueError for what a layer whose tokens move inside of it cannot follow."""
    parts = 1 if groups.expt_tp is None else groups.expt_tp.size()
    graphed = {scope.name for scope in config.cuda_graph_scope}
    captured = config.cuda_graph_impl != "none" and (
        not graphed or bool(graphed & {"moe", "moe_preprocess", "full_iteration"})
    )
    faults = {
        f"expert_tensor_parallel_size is {parts}; give 1, with as many more ranks of experts": parts > 1,
        "moe_token_dispatcher_type is 'flex', which reserves buffers for an exchange that is not used; give 'alltoall'":
            config.moe_token_dispatcher_type == "flex",
        "moe_shared_expert_overlap is True, and shared experts run beside Megatron's own exchange; give False":
            config.moe_shared_expert_overlap,
        "overlap_moe_expert_parallel_comm is True, and overlaps Megatron's own exchange; give False":
            config.overlap_moe_expert_parallel_comm,
        "moe_pad_expert_input_to_capacity is True, and no expert's rows are padded here; give False":
            config.moe_pad_expert_input_to_capacity,
        "moe_apply_probs_on_input is True, and probs multiply the activation here; give False":
            config.moe_apply_probs_on_input,
        f"cuda_graph_impl is {config.cuda_graph_impl!r} and captures the experts, whose sizes are read on the host; "
        "give a cuda_graph_scope without them, such as attn": captured,
    }  # fmt: skip
    found = [text for text, wrong in faults.items() if wrong]
    if found:
        raise ValueError(f"{found[0]}, or use octavo_torch.adapters.megatron.builders with Megatron's own MoELayer")
