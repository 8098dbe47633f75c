"""MoE: a router and its experts, from tokens to combined tokens, as a module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from octavo import Recipe
from octavo.renamed import renamed_arguments
from octavo.router import RouterRule
from octavo.unsaid import UNSAID, Unsaid
from octavo_registry.contract.cards import Activation
from octavo_torch.arrays.checks import brief, check_count, check_flag
from octavo_torch.arrays.group_parameters import PerGroup
from octavo_torch.arrays.operands import check_layout
from octavo_torch.dispatch.room import Room
from octavo_torch.mlp.adapted import Adapters, run_adapted
from octavo_torch.mlp.experts import Experts, QuantizedWeights
from octavo_torch.mlp.mlp import OptionalOperands
from octavo_torch.moe import moe
from octavo_torch.moe.call import MoeCall
from octavo_torch.moe.explain import Given, MoeReport, explain_moe
from octavo_torch.moe.forms import check_form, check_weight_codes
from octavo_torch.moe.parallel.adapted import through_ranks
from octavo_torch.moe.parallel.exchange_for_call import token_exchange_apart
from octavo_torch.moe.parallel.group import ExpertRanks, expert_group
from octavo_torch.moe.parallel.options import Exchange, check_exchange
from octavo_torch.moe.parallel.own_experts import check_sharded, replicas
from octavo_torch.moe.router.checks import check_groups, check_scale, check_score
from octavo_torch.moe.router.choosing import Choice, choose_experts
from octavo_torch.moe.router.logits import router_logits
from octavo_torch.moe.rows.permutation import through_rows
from octavo_torch.scaling.recipe_module import ModuleOptions


class MoE(Experts):
    """y[t] = the sum over a token's choices of weight times expert, in one node of autograd: see moe_mlp.

    Parameters are GroupedMLP's and router [G, K], which is in the dtype of the module. Its product with x and both
    gradients of that are fp32 sums of exact products, which tensor cores compute where x is bf16 on CUDA; where x is
    fp32 or fp16 there, they are TF32 if the process has allowed it.

    The buffer choice_bias fp32 [G], there where `choice_bias` says so, is added to the scores for choosing alone: raise
    it for experts with few tokens. Casting the module leaves it float32. State lives in buffers as GroupedMLP's does.

    With `ep` the module has this rank's num_experts / ranks experts, and the router, which is the same on every rank:
    give it the same values there, and sum its gradients as those of other parameters that ranks share.
    """

    router: nn.Parameter
    choice_bias: Tensor
    _fp32_buffers = (*Experts._fp32_buffers, "choice_bias")

    @renamed_arguments(choices="k")
    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        k: int,
        out_features: int | None = None,
        *,
        score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax",
        groups: int = 1,
        kept_groups: int = 1,
        renormalize: bool = True,
        scale: float = 1.0,
        choice_bias: bool = False,
        form: Literal["keep_all", "standard", "lean", "recompute"] = "standard",
        weight_codes: Literal["keep", "remake"] = "keep",
        activation: Activation = "swiglu",
        bias: bool = False,
        recipe: Recipe | str | Unsaid | None = UNSAID,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | Sequence[str] | None = None,
        seed: int | None = None,
        main_grad: Literal["accumulate", "overwrite"] | None = None,
        per_group_parameters: PerGroup = False,
        delay_wgrad: bool = False,
        interleave: int | None = None,
        ep: ExpertRanks | None = None,
        exchange: Exchange | None = None,
        room: Room | None = None,
    ) -> None:
        """num_experts: of all ranks; k: the choices of each token; out_features: N, None for in_features.

        score, groups, kept_groups, renormalize, scale: how the router chooses, see choose_experts.
        form, weight_codes: what is kept for the backward, see moe_mlp.
        activation to interleave, room: as GroupedMLP has it.
        ep, exchange: the ranks that share the experts, and how tokens reach them, see moe_mlp.
        """
        check_count("num_experts", num_experts)
        check_count("k", k)
        check_count("groups", groups)
        check_count("kept_groups", kept_groups)
        check_flag("choice_bias", choice_bias)
        check_flag("renormalize", renormalize)
        check_scale(scale)
        group = expert_group(ep)
        ranks = 1 if group is None else group.ranks
        if num_experts % ranks:
            raise ValueError(f"num_experts is {num_experts} and ep has {ranks} ranks; give a multiple of {ranks}")
        if exchange is not None and group is None:
            raise ValueError("exchange says how tokens reach other ranks, and ep is None; give both")
        sides = {
            "num_groups": num_experts // ranks,
            "in_features": in_features,
            "hidden_features": hidden_features,
            "out_features": in_features if out_features is None else out_features,
        }
        options = ModuleOptions(recipe, backend, seed, main_grad, per_group_parameters, delay_wgrad, room)
        super().__init__(sides, activation, bias, interleave, options, device=device, dtype=dtype)
        self.ep, self.exchange = group, None if group is None else check_exchange(exchange)
        self.k, self.groups, self.kept_groups = k, groups, kept_groups
        self.score, self.renormalize, self.scale = check_score(score), renormalize, scale
        self.form, self.weight_codes = check_form(form), check_weight_codes(weight_codes)
        self.router = nn.Parameter(torch.empty(num_experts, in_features, device=device, dtype=dtype))
        if choice_bias:
            self.register_buffer("choice_bias", torch.zeros(num_experts, dtype=torch.float32, device=device))
        check_groups(num_experts, k, groups, kept_groups)
        self.start()

    @property
    def choices(self) -> int:
        """k, by its old name."""
        return self.k

    def __setstate__(self, state: dict[str, object]) -> None:
        """A module that was pickled when k was called choices has k, too."""
        super().__setstate__({"k": state.get("choices"), **state})

    def __setattr__(self, name: str, value: object) -> None:
        if name != "router":
            check_sharded(self.__dict__.get("ep"), name, value)
        super().__setattr__(name, value)

    def _replicas(self, process_group: ProcessGroup) -> ProcessGroup | None:
        """With `ep`, of ranks that share the experts nothing is reduced: amax covers their tokens.

        Raises ValueError for a group of replicas and of ranks with other experts.
        """
        return process_group if self.ep is None else replicas(self.ep, process_group)

    def reset_parameters(self) -> None:
        """Parameters uniform in +-1 / sqrt(their inputs), as torch.nn.Linear's; the bias for choosing 0."""
        super().reset_parameters()
        nn.init.uniform_(self.router, -1 / math.sqrt(self.in_features), 1 / math.sqrt(self.in_features))
        self._reset_choice_bias()

    def start_buffers(self) -> None:
        """As RecipeModule's; the bias for choosing is 0."""
        super().start_buffers()
        self._reset_choice_bias()

    def _reset_choice_bias(self) -> None:
        if "choice_bias" in self._buffers:
            self.choice_bias.zero_()

    def choose(self, x: Tensor, replay: Tensor | None = None) -> Choice:
        """The experts of tokens [T, K]: choices, weights and counts. `replay`: choices [T, k] that were made before.

        Raises ValueError for tokens that do not fit, or are not where the router is, and for a router that is sharded.
        """
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"x is {brief(x)}; give tokens [T, {self.in_features}]")
        check_layout("x", x)
        if x.device != self.router.device:
            raise ValueError(
                f"x is on {x.device} and the module's router on {self.router.device}; move one of them there"
            )
        if isinstance(self.router, DTensor):
            raise ValueError(
                "the module's router is a DTensor, and choose multiplies a whole one: FSDP2 gathers parameters before "
                'a forward; call torch.distributed.fsdp.register_fsdp_forward_method(module, "choose") once, after '
                "fully_shard(module)"
            )
        logits = router_logits(x, self.router)
        return choose_experts(
            logits, self.k, score=self.score, bias=self._buffers.get("choice_bias"), groups=self.groups,
            kept_groups=self.kept_groups, renormalize=self.renormalize, scale=self.scale, replay=replay,
            backend=self.backend,
        )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        choice: Choice | None = None,
        *,
        weights: QuantizedWeights | None = None,
        lora: Adapters | None = None,
    ) -> Tensor:
        """y [..., N] of tokens x [..., K].

        choice    what `choose` returned for these tokens, for a caller who reads it, too; None: it is called
        weights   what `quantize_weights` returned this step
        lora      added to the experts' products, in the place of the module's own: see add_lora
        """
        tokens = self._tokens(x)
        if choice is None:
            choice = self.choose(tokens)
        elif not isinstance(choice, Choice):
            raise ValueError(f"choice is {brief(choice)}; give what this module's choose returned")
        self.notice_unused()
        call = self._call()
        routed = moe.Routed(choice.choices, choice.weights, self.of_all_groups("bias1"), self.of_all_groups("bias2"))
        adapters = self.adapters if lora is None else lora
        if adapters is None:
            y = moe.run(tokens, *self.own_weights(weights), routed, call)
        else:
            y = self._adapted(tokens, weights, routed, call, adapters)
        # FSDP2 wants no view of a result
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def explain(self, x: Tensor) -> MoeReport:
        """What a forward and backward of tokens x [..., K] run, printable: who routes, moves, quantizes and multiplies,
        what is read where the tokens stand, and with `ep` how they reach the other ranks.

        Nothing is computed, and nothing is sent. Raises as `forward` does.
        """
        given = Given(*self.weights, self.of_all_groups("bias1"), self.of_all_groups("bias2"), self.router)
        rule = RouterRule(self.k, self.score, self.groups, self.kept_groups, self.renormalize, self.scale)
        return explain_moe(self._tokens(x), given, rule, self._call(), self.adapters is not None)

    def _tokens(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor):
            check_layout("x", x)
        if not isinstance(x, Tensor) or not x.dim() or x.shape[-1] != self.in_features:
            raise ValueError(f"x is {brief(x)}; give tokens [..., {self.in_features}]")
        return x.reshape(-1, self.in_features)

    def _call(self) -> MoeCall:
        return MoeCall(
            recipe=self.recipe,
            backend=self.backend,
            seed=self.seed,
            record=self.training,
            main_grad=self.main_grad,
            room=self.room,
            activation=self.activation,
            interleave=self.interleave,
            states=self.states,
            delayed_wgrad=self.delayed_wgrad,
            probes=self.own_probes,
            form=self.form,
            weight_codes=self.weight_codes,
            ep=self.ep,
            exchange=self.exchange,
        )

    def _adapted(
        self,
        tokens: Tensor,
        weights: QuantizedWeights | None,
        routed: moe.Routed,
        call: MoeCall,
        adapters: Adapters,
    ) -> Tensor:
        """y with what adapters add: rows are gathered, pass the MLP, and are summed, each an operation of autograd."""
        w1, w2 = self.own_weights(weights)

        def experts(rows: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
            # a weight multiplies the activation, and fc2's bias apart, as in moe_mlp
            optional = OptionalOperands(probs, routed.bias1, routed.bias2, None if routed.bias2 is None else probs)
            return run_adapted(rows, w1, w2, sizes, optional, call, adapters)

        if self.ep is not None:
            given = tokens, routed.choices, routed.weights
            parts: tuple[object, ...] = (self, *adapters)
            trains = any(p.requires_grad for part in parts if isinstance(part, nn.Module) for p in part.parameters())
            return through_ranks(
                given, self.num_groups, experts, partial(token_exchange_apart, call, self, given, trains),
                recompute=self.form == "recompute", backend=self.backend,
            )  # fmt: skip
        return through_rows(
            tokens, routed.choices, routed.weights, self.num_groups, experts,
            recompute=self.form == "recompute", backend=self.backend,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Shape, k, form and recipe."""
        return (
            f"{super().extra_repr()}, k={self.k}, score={self.score}, form={self.form}, "
            f"weight_codes={self.weight_codes}"
            + ("" if self.ep is None else f", rank={self.ep.rank} of {self.ep.ranks}")
        )
