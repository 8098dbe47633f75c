"""Experts: the parameters and the state of two grouped linear layers with an activation between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from octavo_registry.contract.cards import GATED, Activation
from octavo_torch.arrays.checks import brief, check_flag
from octavo_torch.arrays.interleaving import check_interleave
from octavo_torch.arrays.per_group import Weights
from octavo_torch.functions.activations import check_activation
from octavo_torch.linear.quantize_weight import code_weights, quantize_weight
from octavo_torch.linear.weights import QuantizedWeight, check_own
from octavo_torch.mlp.adapted import Adapters
from octavo_torch.mlp.call import Probes, States
from octavo_torch.mlp.packed_weight import PackedWeight
from octavo_torch.scaling.recipe_module import ModuleOptions, RecipeModule

QuantizedWeights = tuple[QuantizedWeight, QuantizedWeight]


class Experts(RecipeModule):
    """What GroupedMLP and MoE have in common.

    Parameters are plain tensors: weight1 [G, 2 F, K], gate half first unless `interleave` says otherwise, for swiglu,
    geglu, geglu_tanh and clamped_swiglu, [G, F, K] for silu, gelu, gelu_tanh and relu2; weight2 [G, N, F]; bias1
    [G, 2 F or F] and bias2 [G, N]. With `per_group_parameters` weight1_0, weight1_1 ... and so on, see GroupParameters.
    State lives in RecipeModule's buffers: amax_history [2, 3, H, G] and encode_scale [2, 3, G], of the first layer and
    of the second. One seed serves both layers, as grouped_mlp's does.
    """

    num_groups: int
    in_features: int
    hidden_features: int
    out_features: int
    activation: Activation
    weight1: nn.Parameter
    weight2: nn.Parameter
    bias1: nn.Parameter | None
    bias2: nn.Parameter | None

    def __init__(
        self,
        sides: Mapping[str, int],
        activation: Activation,
        bias: bool,
        interleave: int | None,
        options: ModuleOptions,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """sides: num_groups, in_features, hidden_features and out_features; the rest as GroupedMLP has it."""
        check_flag("bias", bias)
        super().__init__(sides, options, device, layers=(2,))
        self.activation = check_activation(activation)
        groups, hidden = self.num_groups, self.hidden_features
        inner = hidden * (2 if activation in GATED else 1)
        shapes: dict[str, tuple[int, ...] | None] = {
            "weight1": (groups, inner, self.in_features),
            "bias1": (groups, inner) if bias else None,
            "weight2": (groups, self.out_features, hidden),
            "bias2": (groups, self.out_features) if bias else None,
        }
        check_interleave(interleave, self.activation, torch.empty(groups, inner, 0, device="meta"))
        self.interleave = interleave
        self.add_parameters(shapes, device, dtype)

    def reset_parameters(self) -> None:
        """Each layer's parameters uniform in +-1 / sqrt(its inputs), as torch.nn.Linear's; buffers as at the start."""
        for number, inputs in (("1", self.in_features), ("2", self.hidden_features)):
            for name in ("weight", "bias"):
                self.reset_uniform(name + number, 1 / math.sqrt(inputs))
        self.reset_buffers()

    def start(self) -> None:
        """Initial values, which become codes inside of `quantized_parameters`: the end of a constructor."""
        self.reset_parameters()
        code_weights(self, {"weight1": self.interleave, "weight2": None})

    @property
    def weights(self) -> tuple[Weights, Weights]:
        """Both weights, each of them one tensor or one per group: what `grouped_mlp` takes."""
        first, second = self.of_all_groups("weight1"), self.of_all_groups("weight2")
        assert first is not None
        assert second is not None
        return first, second

    def own_weights(self, weights: object) -> tuple[Weights | QuantizedWeight, Weights | QuantizedWeight]:
        """Both weights as a call takes them: `weights`, what `quantize_weights` returned, where that is given."""
        if weights is None:
            return self.weights
        if not isinstance(weights, tuple | list) or len(weights) != 2:
            raise ValueError(f"weights is {brief(weights)}; give what this module's quantize_weights returned")
        for quantized, own in zip(weights, self.weights, strict=True):
            check_own("weights", quantized, own)
        return weights[0], weights[1]

    @property
    def adapters(self) -> Adapters | None:
        """The module's own adapters, see add_lora; None where it runs without any as one operation of autograd."""
        own = cast(Adapters, (self._modules.get("lora1"), self._modules.get("lora2")))
        if own == (None, None) and not isinstance(self._parameters.get("weight1"), PackedWeight):
            return None
        return own

    @property
    def own_probes(self) -> Probes | None:
        """What counts in an observed step, of each layer."""
        return (self.probes[0], self.probes[1]) if self.probes else None

    def notice_unused(self) -> None:
        """Notices, once, amax that are recorded and of which no scales are ever computed."""
        if self._stateful and self.training and not torch.compiler.is_compiling():
            self.notice_unused_amax(self.weights[0])

    @property
    def states(self) -> States | None:
        """Delayed scaling's states of both layers; None for other recipes."""
        if not self._stateful:
            return None
        first, second = self.delayed_states
        return first, second

    def quantize_weights(
        self, *, out: QuantizedWeights | None = None, unchanged: Tensor | None = None
    ) -> QuantizedWeights:
        """Both weights quantized once, for every forward until they change; delayed scaling records their amax
        in training mode.

        out, unchanged   write an earlier result's codes again, unless a flag on the device says that nothing has
                         changed: see octavo_torch.quantize_weight
        """
        seed = self.seed_base if self._stochastic else None
        states = self.states or (None, None)
        before = (None, None) if out is None else out
        first, second = (
            quantize_weight(
                weight, self.recipe, seed=seed, state=state, backend=self.backend, interleave=interleave, out=into,
                unchanged=unchanged, record=self.training,
            )
            for weight, state, interleave, into in zip(
                self.weights, states, (self.interleave, None), before, strict=True
            )
        )  # fmt: skip
        return first, second

    def extra_repr(self) -> str:
        """Shape, activation, bias and recipe."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, hidden_features={self.hidden_features}, "
            f"out_features={self.out_features}, activation={self.activation}, bias={self.has('bias1')}, "
            f"recipe={self.recipe.kind}{self.repr_of_options()}"
            + ("" if self.interleave is None else f", interleave={self.interleave}")
        )
