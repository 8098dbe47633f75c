"""GroupedMLP: two grouped linear layers with an activation between them, as a module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from octavo import Recipe
from octavo_registry.contract.cards import GATED, Activation
from octavo_torch.arrays.checks import brief, check_flag
from octavo_torch.arrays.interleaving import check_interleave
from octavo_torch.arrays.per_group import Weights
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.functions.activations import check_activation
from octavo_torch.linear.grouped import Rows
from octavo_torch.linear.quantized_operands import quantize_weight
from octavo_torch.linear.weights import QuantizedWeight, check_own
from octavo_torch.mlp import mlp
from octavo_torch.mlp.call import MlpCall, States
from octavo_torch.mlp.plan import MlpPlan
from octavo_torch.scaling.recipe_module import ModuleOptions, RecipeModule

QuantizedWeights = tuple[QuantizedWeight, QuantizedWeight]


class GroupedMLP(RecipeModule):
    """y[r] = weight2[g] (probs[r] act(weight1[g] x[r] + bias1[g])) + bias2[g] for every row r of group g.

    Parameters are plain tensors: weight1 [G, 2 F, K], gate half first unless `interleave` says otherwise, for swiglu,
    geglu and geglu_tanh, [G, F, K] for silu, gelu, gelu_tanh and relu2; weight2 [G, N, F]; bias1 [G, 2 F or F] and
    bias2 [G, N]. With `per_group_parameters` weight1_0, weight1_1 ... and so on, see GroupParameters. State lives in
    RecipeModule's buffers: amax_history [2, 3, H, G] and encode_scale [2, 3, G], of the first layer and of the second.
    One seed serves both layers, as grouped_mlp's does.
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
        num_groups: int,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        recipe: Recipe | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        backend: str | Sequence[str] | None = None,
        seed: int | None = None,
        main_grad: Literal["accumulate", "overwrite"] | None = None,
        per_group_parameters: bool = False,
        delay_wgrad: bool = False,
        interleave: int | None = None,
    ) -> None:
        """hidden_features: F, what the second layer reads; out_features: N, None for in_features.

        seed: base of stochastic rounding's seeds; None draws one from torch's generator.
        main_grad: "accumulate" or "overwrite" writes the weights' gradients into their `main_grad`, see grouped_linear.
        per_group_parameters: a parameter a group in the place of one for all.
        delay_wgrad: backward leaves the weights' gradients to `backward_dw()`.
        interleave: rows of a block where gate and up projection take turns in weight1 and bias1, see grouped_mlp.
        """
        check_flag("bias", bias)
        sides = {
            "num_groups": num_groups,
            "in_features": in_features,
            "hidden_features": hidden_features,
            "out_features": in_features if out_features is None else out_features,
        }
        options = ModuleOptions(recipe, backend, seed, main_grad, per_group_parameters, delay_wgrad)
        super().__init__(sides, options, device, layers=(2,))
        self.activation = check_activation(activation)
        inner = hidden_features * (2 if activation in GATED else 1)
        shapes: dict[str, tuple[int, ...] | None] = {
            "weight1": (num_groups, inner, in_features),
            "bias1": (num_groups, inner) if bias else None,
            "weight2": (num_groups, self.out_features, hidden_features),
            "bias2": (num_groups, self.out_features) if bias else None,
        }
        check_interleave(interleave, self.activation, torch.empty(num_groups, inner, 0, device="meta"))
        self.interleave = interleave
        self.add_parameters(shapes, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each layer's parameters uniform in +-1 / sqrt(its inputs), as torch.nn.Linear's; buffers as at the start."""
        for number, inputs in (("1", self.in_features), ("2", self.hidden_features)):
            for name in ("weight", "bias"):
                self.reset_uniform(name + number, 1 / math.sqrt(inputs))
        self.reset_buffers()

    @property
    def weights(self) -> tuple[Weights, Weights]:
        """Both weights, each of them one tensor or one a group: what `grouped_mlp` takes."""
        first, second = self.of_all_groups("weight1"), self.of_all_groups("weight2")
        assert first is not None
        assert second is not None
        return first, second

    def forward(
        self,
        x: Rows,
        group_sizes: GroupSizes | None,
        probs: Tensor | None = None,
        *,
        weights: QuantizedWeights | None = None,
        bias2_scales: Tensor | None = None,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
    ) -> Tensor:
        """y [M, N]: see octavo_torch.grouped_mlp. `weights`: what `quantize_weights` returned this step."""
        first, second = self.weights
        if weights is not None:
            if not isinstance(weights, tuple | list) or len(weights) != 2:
                raise ValueError(f"weights is {brief(weights)}; give what this module's quantize_weights returned")
            for quantized, own in zip(weights, (first, second), strict=True):
                check_own("weights", quantized, own)
        call = MlpCall(
            recipe=self.recipe,
            backend=self.backend,
            seed=self.seed,
            record=self.training,
            out=out,
            grad_input=grad_input,
            main_grad=self.main_grad,
            activation=self.activation,
            interleave=self.interleave,
            states=self.states,
            delayed_wgrad=self.delayed_wgrad,
        )
        extras = mlp.Extras(probs, self.of_all_groups("bias1"), self.of_all_groups("bias2"), bias2_scales)
        w1, w2 = (first, second) if weights is None else weights
        return mlp.run(x, w1, w2, group_sizes, extras, call)

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
        """Both weights quantized once, for every forward until they change; delayed scaling records their amax.

        out, unchanged   write an earlier result's codes again, unless a flag on the device says that nothing has
                         changed: see octavo_torch.quantize_weight
        """
        seed = self.seed_base if self._stochastic else None
        states = self.states or (None, None)
        before = (None, None) if out is None else out
        first, second = (
            quantize_weight(
                weight, self.recipe, seed=seed, state=state, backend=self.backend, interleave=interleave, out=into,
                unchanged=unchanged,
            )
            for weight, state, interleave, into in zip(
                self.weights, states, (self.interleave, None), before, strict=True
            )
        )  # fmt: skip
        return first, second

    def explain(self, x: Tensor, group_sizes: GroupSizes) -> MlpPlan:
        """What a forward and backward with these runs, printable: backends, layouts, what is fused and what is not."""
        return mlp.explain_mlp(
            x, *self.weights, group_sizes,
            activation=self.activation, recipe=self.recipe, backend=self.backend,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Shape, activation, bias and recipe."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, hidden_features={self.hidden_features}, "
            f"out_features={self.out_features}, activation={self.activation}, bias={'bias1' in self._shapes}, "
            f"recipe={self.recipe.kind}{self.repr_of_options()}"
            + ("" if self.interleave is None else f", interleave={self.interleave}")
        )
