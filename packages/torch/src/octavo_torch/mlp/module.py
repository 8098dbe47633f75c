"""GroupedMLP: two grouped linear layers with an activation between them, as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from octavo import Recipe
from octavo.unsaid import UNSAID, Unsaid
from octavo_registry.contract.cards import Activation
from octavo_torch.arrays.group_parameters import PerGroup
from octavo_torch.arrays.sizes import GroupSizes
from octavo_torch.dispatch.room import Room
from octavo_torch.linear.grouped import InputRows
from octavo_torch.mlp import mlp
from octavo_torch.mlp.adapted import Adapters, run_adapted
from octavo_torch.mlp.call import MlpCall
from octavo_torch.mlp.experts import Experts, QuantizedWeights
from octavo_torch.mlp.plan import MlpPlan
from octavo_torch.scaling.recipe_module import ModuleOptions


class GroupedMLP(Experts):
    """y[r] = weight2[g] (probs[r] act(weight1[g] x[r] + bias1[g])) + bias2[g] for every row r of group g.

    Parameters are plain tensors: weight1 [G, 2 F, K], gate half first unless `interleave` says otherwise, for swiglu,
    geglu, geglu_tanh and clamped_swiglu, [G, F, K] for silu, gelu, gelu_tanh and relu2; weight2 [G, N, F]; bias1
    [G, 2 F or F] and bias2 [G, N]. With `per_group_parameters` weight1_0, weight1_1 ... and so on, see GroupParameters.
    State lives in RecipeModule's buffers: amax_history [2, 3, H, G] and encode_scale [2, 3, G], of the first layer and
    of the second. One seed serves both layers, as grouped_mlp's does.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
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
        room: Room | None = None,
    ) -> None:
        """Parameters are uniform in +-1 / sqrt(a layer's inputs), as torch.nn.Linear's are.

        num_groups              G, the experts
        in_features             K
        hidden_features         F, what the second layer reads
        out_features            N; None: in_features
        activation              swiglu, geglu, geglu_tanh, clamped_swiglu (gated), silu, gelu, gelu_tanh or relu2
        bias                    adds bias1 and bias2
        recipe                  of all GEMMs of both layers; None: high precision, no quantization
        device, dtype           of the parameters; None: torch's defaults
        backend                 a name or a closed list of names; None: the registry's preference
        seed                    base of stochastic rounding's seeds; None: drawn from torch's generator
        main_grad               "accumulate" or "overwrite": gradients of weights go to their `main_grad`
        per_group_parameters    one parameter per group: weight1_0, weight1_1 and so on; {"weight"} or {"bias"}: of
                                these alone
        delay_wgrad             backward leaves the weights' gradients to `backward_dw()`
        interleave              rows of a block where gate and up projection take turns in weight1 and bias1
        room                    multiprocessors that a call leaves to what runs beside it; None: it takes all
        """
        sides = {
            "num_groups": num_groups,
            "in_features": in_features,
            "hidden_features": hidden_features,
            "out_features": in_features if out_features is None else out_features,
        }
        options = ModuleOptions(recipe, backend, seed, main_grad, per_group_parameters, delay_wgrad, room)
        super().__init__(sides, activation, bias, interleave, options, device=device, dtype=dtype)
        self.start()

    def forward(
        self,
        x: InputRows,
        group_sizes: GroupSizes | None,
        probs: Tensor | None = None,
        *,
        weights: QuantizedWeights | None = None,
        bias2_scales: Tensor | None = None,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
        lora: Adapters | None = None,
    ) -> Tensor:
        """y [M, N], or [..., N] of x [..., K]: see octavo_torch.grouped_mlp.

        weights   what `quantize_weights` returned this step
        lora      added to the two products, in the place of the module's own: see add_lora
        """
        w1, w2 = self.own_weights(weights)
        self.notice_unused()
        call = MlpCall(
            recipe=self.recipe,
            backend=self.backend,
            seed=self.seed,
            record=self.training,
            out=out,
            grad_input=grad_input,
            main_grad=self.main_grad,
            room=self.room,
            activation=self.activation,
            interleave=self.interleave,
            states=self.states,
            delayed_wgrad=self.delayed_wgrad,
            probes=self.own_probes,
        )
        optional = mlp.OptionalOperands(probs, self.of_all_groups("bias1"), self.of_all_groups("bias2"), bias2_scales)
        adapters = self.adapters if lora is None else lora
        if adapters is not None:
            return run_adapted(x, w1, w2, group_sizes, optional, call, adapters)
        return mlp.run(x, w1, w2, group_sizes, optional, call)

    def explain(self, x: Tensor, group_sizes: GroupSizes) -> MlpPlan:
        """What a forward and backward with these runs, printable: backends, layouts, what is fused and what is not."""
        return mlp.explain_mlp(
            x, *self.weights, group_sizes,
            activation=self.activation, recipe=self.recipe, backend=self.backend,
        )  # fmt: skip
