"""GroupedMLP: two grouped linear layers with an activation between them, as a module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from octavo import Recipe
from octavo_registry.cards import GATED, Activation
from octavo_torch import functional, mlp
from octavo_torch.activations import check_activation
from octavo_torch.mlp_plan import MlpPlan
from octavo_torch.recipe_module import RecipeModule
from octavo_torch.weights import QuantizedWeight

QuantizedWeights = tuple[QuantizedWeight, QuantizedWeight]


class GroupedMLP(RecipeModule):
    """y[r] = weight2[g] (probs[r] act(weight1[g] x[r] + bias1[g])) + bias2[g] for every row r of group g.

    Parameters are plain tensors: weight1 [G, 2 F, K], gate half first, for swiglu, geglu and geglu_tanh, [G, F, K] for
    silu, gelu, gelu_tanh and relu2; weight2 [G, N, F]; bias1 [G, 2 F or F] and bias2 [G, N]. State lives in
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
    ) -> None:
        """hidden_features: F, what the second layer reads; out_features: N, None for in_features.

        seed: base of stochastic rounding's seeds; None draws one from torch's generator.
        main_grad: "accumulate" or "overwrite" writes the weights' gradients into their `main_grad`, see grouped_linear.
        """
        sides = {
            "num_groups": num_groups,
            "in_features": in_features,
            "hidden_features": hidden_features,
            "out_features": in_features if out_features is None else out_features,
        }
        super().__init__(sides, recipe, device, backend, seed, main_grad, layers=(2,))
        self.activation = check_activation(activation)
        inner = hidden_features * (2 if activation in GATED else 1)
        shapes = {"1": (num_groups, inner, in_features), "2": (num_groups, self.out_features, hidden_features)}
        for number, shape in shapes.items():
            setattr(self, f"weight{number}", nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
            made = nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype)) if bias else None
            self.register_parameter(f"bias{number}", made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each layer's parameters uniform in +-1 / sqrt(its inputs), as torch.nn.Linear's; buffers as at the start."""
        for weight, bias in ((self.weight1, self.bias1), (self.weight2, self.bias2)):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)
        self.reset_buffers()

    def forward(
        self,
        x: Tensor,
        group_sizes: Any,
        probs: Tensor | None = None,
        *,
        weights: QuantizedWeights | None = None,
        bias2_scales: Tensor | None = None,
    ) -> Tensor:
        """y [M, N]: see octavo_torch.grouped_mlp. `weights`: what `quantize_weights` returned this step."""
        first, second = self.weight1, self.weight2
        if weights is not None and (weights[0].weight is not first or weights[1].weight is not second):
            raise ValueError("weights were not made by this module; give what its quantize_weights returned")
        return mlp.run(
            x,
            first if weights is None else weights[0],
            second if weights is None else weights[1],
            group_sizes,
            self.recipe,
            activation=self.activation,
            probs=probs,
            bias1=self.bias1,
            bias2=self.bias2,
            bias2_scales=bias2_scales,
            seed=self.seed,
            state=self.delayed_states or None,
            record=self.training,
            backend=self.backend,
            main_grad=self.main_grad,
        )

    def quantize_weights(self) -> QuantizedWeights:
        """Both weights quantized once, for every forward until they change; delayed scaling records their amax."""
        seed = self.seed_base if self._stochastic else None
        states = self.delayed_states or (None, None)
        first, second = (
            functional.quantize_weight(weight, self.recipe, seed=seed, state=state, backend=self.backend)
            for weight, state in zip((self.weight1, self.weight2), states, strict=True)
        )
        return first, second

    def explain(self, x: Tensor, group_sizes: Any) -> MlpPlan:
        """What a forward and backward with these runs, printable: backends, layouts, what is fused and what is not."""
        return mlp.explain_mlp(
            x, self.weight1, self.weight2, group_sizes,
            activation=self.activation, recipe=self.recipe, backend=self.backend,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Shape, activation, bias and recipe."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, hidden_features={self.hidden_features}, "
            f"out_features={self.out_features}, activation={self.activation}, bias={self.bias1 is not None}, "
            f"recipe={self.recipe.kind}"
        )
